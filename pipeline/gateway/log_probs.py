"""Log probabilities in the two forms that OpenAI has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from pipeline.client import Chunk


class Tokenizer(Protocol):
    """What is needed of the `tokenizers` library."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Any: ...
    def encode_batch_fast(self, texts: Sequence[str], /) -> Sequence[Any]: ...
    def decode(self, ids: list[int], /, *, skip_special_tokens: bool = True) -> str: ...


class _Token(NamedTuple):
    text: str
    log_prob: float
    likeliest: Sequence[tuple[int, float]] = ()  # ids and log probabilities at its position


def chat_log_probs(chunks: Sequence[Chunk], tokenizer: Tokenizer) -> dict[str, Any]:
    """{"content": [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}]}"""
    content = [
        {
            **_told(token.text, token.log_prob),
            "top_logprobs": [_told(_text(id, tokenizer), log_prob) for id, log_prob in token.likeliest],
        }
        for token in _tokens(chunks, tokenizer)
    ]
    return {"content": content, "refusal": None}


def text_log_probs(chunks: Sequence[Chunk], tokenizer: Tokenizer) -> dict[str, Any]:
    """{"tokens", "token_logprobs", "text_offset", "top_logprobs"}"""
    tokens = list(_tokens(chunks, tokenizer))
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token.text)
    tops = [{_text(id, tokenizer): log_prob for id, log_prob in token.likeliest} for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "text_offset": offsets,
        "top_logprobs": tops if any(tops) else None,
    }


def _told(text: str, log_prob: float) -> dict[str, Any]:
    """A part of a character has no text of its own, and its bytes are not told."""
    return {"token": text, "logprob": log_prob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _text(id: int, tokenizer: Tokenizer) -> str:
    """Of a token in the middle of a text: some tokenizers drop the space before the first."""
    before = tokenizer.encode("a", add_special_tokens=False).ids
    start = tokenizer.decode(before, skip_special_tokens=False)
    return tokenizer.decode([*before, id], skip_special_tokens=False)[len(start) :]


def _tokens(chunks: Sequence[Chunk], tokenizer: Tokenizer) -> Iterator[_Token]:
    """Each token; where the text of a chunk cannot be divided, its first token has it."""
    for chunk in chunks:
        values = chunk.log_probs or ()
        texts = [chunk.text]
        if len(values) > 1:
            offsets = tokenizer.encode(chunk.text, add_special_tokens=False).offsets
            if len(offsets) == len(values):
                texts = [chunk.text[start:end] for start, end in offsets]
        tops = chunk.top_log_probs or ()
        for index, value in enumerate(values):
            text = texts[index] if index < len(texts) else ""
            yield _Token(text, value, tops[index] if index < len(tops) else ())
