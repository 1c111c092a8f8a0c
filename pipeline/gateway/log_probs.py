"""Log probabilities in the two forms that OpenAI has. The engine tells those of the chosen tokens only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.client import Chunk
from pipeline.client.prompt_limit import Tokenizer


def chat_log_probs(chunks: Sequence[Chunk], tokenizer: Tokenizer) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs}]}"""
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in _tokens(chunks, tokenizer)
    ]
    return {"content": content, "refusal": None}


def text_log_probs(chunks: Sequence[Chunk], tokenizer: Tokenizer) -> dict[str, Any]:
    """{"tokens", "token_logprobs", "text_offset", "top_logprobs"}"""
    pairs = list(_tokens(chunks, tokenizer))
    offsets, at = [], 0
    for text, _ in pairs:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": [text for text, _ in pairs],
        "token_logprobs": [value for _, value in pairs],
        "text_offset": offsets,
        "top_logprobs": None,
    }


def _tokens(chunks: Sequence[Chunk], tokenizer: Tokenizer) -> Iterator[tuple[str, float]]:
    """Text and log probability of each token; where the text of a chunk cannot be divided, its first token has it."""
    for chunk in chunks:
        values = chunk.log_probs or ()
        texts = [chunk.text]
        if len(values) > 1:
            offsets = tokenizer.encode(chunk.text, add_special_tokens=False).offsets
            if len(offsets) == len(values):
                texts = [chunk.text[start:end] for start, end in offsets]
        for index, value in enumerate(values):
            yield texts[index] if index < len(texts) else "", value
