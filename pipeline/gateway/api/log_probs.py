"""Log probabilities as OpenAI's two endpoints write them, and those of prompts as vLLM does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.client import Chunk, PromptLogProbs
from pipeline.gateway.tokenizer import ModelTokenizer

# JSON has no infinity; vLLM writes the same number.
_LEAST = -9999.0


class _TokenLogProbs(NamedTuple):
    text: str
    log_prob: float | None
    alternatives: Sequence[tuple[int, float]] = ()  # ids and log probabilities at the same position


def chat_log_probs(chunks: Sequence[Chunk], tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Log probabilities as chats have them: {"content": [{token, logprob, bytes, top_logprobs: [the same]}]}."""
    content = [
        {
            **_chat_token(token.text, token.log_prob),
            "top_logprobs": [
                _chat_token(tokenizer.token_text(id), log_prob) for id, log_prob in token.alternatives
            ],
        }
        for token in _tokens(chunks, tokenizer)
    ]
    return {"content": content, "refusal": None}


def text_log_probs(
    chunks: Sequence[Chunk],
    tokenizer: ModelTokenizer,
    *,
    start: int = 0,
    echoed: str = "",
    num_alternatives: int = 0,
) -> dict[str, Any]:
    """Log probabilities as plain completions have them: {"tokens", "token_logprobs", "text_offset", "top_logprobs"}.

    Args:
        start: where the text of the chunks begins in the text of the choice, in characters.
        echoed: prompt, if the text of the choice begins with it: its tokens come first, the first without a value.
        num_alternatives: number of alternatives at each position of the prompt, besides the prompt's own token.
    """
    prompt = chunks[0].prompt_log_probs if echoed and chunks else None
    front = [] if prompt is None else list(_prompt_tokens(prompt, tokenizer, num_alternatives))
    offsets = [] if prompt is None else _prompt_offsets(prompt, front, echoed, tokenizer)
    tokens = [*front, *_tokens(chunks, tokenizer)]
    for token in tokens[len(front) :]:
        offsets.append(start)
        start += len(token.text)
    tops = [_by_text(token, tokenizer) for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "text_offset": offsets,
        "top_logprobs": tops if any(tops) else None,
    }


def prompt_log_probs(
    prompt: PromptLogProbs, tokenizer: ModelTokenizer, num_alternatives: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Log probabilities of a prompt as vLLM writes them (`prompt_logprobs`).

    At each position are the prompt's own token and `num_alternatives` others.

    Returns:
        None for the first token; for each other {id: {logprob, rank, decoded_token}}. The rank of the prompt's own
        token is None if it is not among the most probable tokens.
    """
    written: list[dict[str, dict[str, Any]] | None] = [None]
    for own, log_prob, top in list(
        zip(prompt.token_ids, prompt.log_probs, prompt.top_log_probs, strict=True)
    )[1:]:
        ranked = {id: rank for rank, (id, _) in enumerate(top[:num_alternatives], 1)}
        values = {own: log_prob, **dict(top[:num_alternatives])}
        written.append(
            {
                str(id): {
                    "logprob": max(value if value is not None else _LEAST, _LEAST),
                    "rank": ranked.get(id),
                    "decoded_token": tokenizer.token_text(id),
                }
                for id, value in values.items()
            }
        )
    return written


def _by_text(token: _TokenLogProbs, tokenizer: ModelTokenizer) -> dict[str, float] | None:
    """Log probabilities by text, of which several tokens may have the same: the most probable token counts."""
    if token.log_prob is None:
        return None
    texts: dict[str, float] = {}
    for id, log_prob in token.alternatives:
        texts.setdefault(tokenizer.token_text(id), log_prob)
    return texts


def _prompt_tokens(
    prompt: PromptLogProbs, tokenizer: ModelTokenizer, num_alternatives: int
) -> Iterator[_TokenLogProbs]:
    for own, log_prob, top in zip(prompt.token_ids, prompt.log_probs, prompt.top_log_probs, strict=True):
        alternatives = list(top[:num_alternatives])
        # As OpenAI does it, the prompt's own token is always among them.
        if num_alternatives and log_prob is not None and own not in dict(alternatives):
            alternatives.append((own, log_prob))
        yield _TokenLogProbs(tokenizer.token_text(own), log_prob, alternatives)


def _prompt_offsets(
    prompt: PromptLogProbs, tokens: Sequence[_TokenLogProbs], text: str, tokenizer: ModelTokenizer
) -> list[int]:
    """Where the tokens of a prompt begin in its text; tokens that were put in front of it begin with it."""
    offsets = tokenizer.offsets(text)
    in_front = len(prompt.token_ids) - len(offsets)
    if in_front >= 0 and prompt.token_ids[in_front:] == tuple(
        tokenizer.encode(text, add_special_tokens=False)
    ):
        return [0] * in_front + [start for start, _ in offsets]
    # The prompt came as token ids that are not those of its text.
    starts, at = [], 0
    for token in tokens:
        starts.append(min(at, len(text)))
        at += len(token.text)
    return starts


def _chat_token(text: str, log_prob: float | None) -> dict[str, Any]:
    """A token that is a part of a character has no text of its own, and its bytes are not known."""
    return {"token": text, "logprob": log_prob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _tokens(chunks: Sequence[Chunk], tokenizer: ModelTokenizer) -> Iterator[_TokenLogProbs]:
    """Each token. If the text of a chunk cannot be divided among its tokens, the first token has all of it."""
    for chunk in chunks:
        values = chunk.log_probs or ()
        texts = [chunk.text]
        if len(values) > 1:
            offsets = tokenizer.offsets(chunk.text)
            if len(offsets) == len(values):
                texts = [chunk.text[start:end] for start, end in offsets]
        tops = chunk.top_log_probs or ()
        for index, value in enumerate(values):
            text = texts[index] if index < len(texts) else ""
            yield _TokenLogProbs(text, value, tops[index] if index < len(tops) else ())
