"""From logits to tokens, for all rows of a step at once.

The order is TensorRT-LLM's: bias, temperature, repetition, presence and frequency penalty, words that must not come,
then top-k, then top-p. Where every row is greedy and nothing else was asked for, it is one argmax.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .noise import gumbel
from .sequence import Sequence

Floats = npt.NDArray[np.float32]


class Row(NamedTuple):
    """Whose next token is wanted: after its tokens and the first `ahead` of its drafts."""

    sequence: Sequence
    ahead: int


class Choice(NamedTuple):
    tokens: list[int]
    log_probs: list[float]  # 0 where the request does not want them


def choose(logits: Floats, rows: list[Row]) -> Choice:
    """The next token for each row of `logits` [rows, vocab_size]."""
    tokens = logits.argmax(axis=-1).tolist()
    log_probs = [0.0] * len(rows)
    special = [at for at, (sequence, ahead) in enumerate(rows) if not _plain(sequence, ahead)]
    if not special:
        return Choice(tokens, log_probs)
    picked = [rows[at] for at in special]
    processed = logits[special]  # a copy
    for row, (sequence, ahead) in zip(processed, picked, strict=True):
        _process(row, sequence, ahead)
    chosen = processed.argmax(axis=-1)
    sampled = [at for at, (sequence, _) in enumerate(picked) if not sequence.request.sampling.greedy]
    if sampled:
        chosen[sampled] = sample(
            processed[sampled],
            top_k=np.array([picked[at].sequence.request.sampling.top_k for at in sampled]),
            top_p=np.array([_top_p(*picked[at]) for at in sampled]),
            seeds=np.array([picked[at].sequence.seed for at in sampled], np.uint64),
            positions=np.array(
                [picked[at].sequence.generated + picked[at].ahead for at in sampled], np.uint64
            ),
        )
    for at, row, token, (sequence, _) in zip(special, processed, chosen.tolist(), picked, strict=True):
        tokens[at] = token
        if sequence.request.log_probs:
            log_probs[at] = float(row[token] - _log_sum_exp(row))
    return Choice(tokens, log_probs)


def sample(
    logits: Floats,
    *,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.uint64],
) -> npt.NDArray[np.int64]:
    """One token a row of `logits` [rows, vocab_size]; 0 for `top_k` or `top_p` keeps all tokens."""
    vocab = logits.shape[-1]
    top_k = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
    top_p = np.where(top_p > 0, top_p, 1.0)
    if (top_k == vocab).all() and (top_p == 1).all():
        ids = np.broadcast_to(np.arange(vocab), logits.shape)
        scores = logits.astype(np.float64)
    else:
        ids, values = _largest(logits, int(top_k.max()))
        weights = np.exp(values.astype(np.float64) - values[:, :1])
        weights[np.arange(ids.shape[-1]) >= top_k[:, None]] = 0
        before = np.cumsum(weights, axis=-1) - weights
        kept = (before < top_p[:, None] * weights.sum(axis=-1, keepdims=True)) & (weights > 0)
        scores = np.where(kept, values, -np.inf)
    scores = scores + gumbel(seeds[:, None], positions[:, None], ids.astype(np.uint64))
    best = scores.argmax(axis=-1)
    tokens: npt.NDArray[np.int64] = np.take_along_axis(ids, best[:, None], axis=-1)[:, 0]
    return tokens


def _largest(logits: Floats, width: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """Ids and logits of the `width` largest of each row, in falling order."""
    ids = np.argpartition(-logits, width - 1, axis=-1)[:, :width] if width < logits.shape[-1] else None
    values = logits if ids is None else np.take_along_axis(logits, ids, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")
    sorted_ids = order if ids is None else np.take_along_axis(ids, order, axis=-1)
    return sorted_ids, np.take_along_axis(values, order, axis=-1)


def _plain(sequence: Sequence, ahead: int) -> bool:
    return sequence.is_plain and sequence.generated + ahead >= sequence.request.min_new_tokens


def _process(row: Floats, sequence: Sequence, ahead: int) -> None:
    """Bias, temperature, penalties and banned tokens, in place on `row` [vocab_size]."""
    request, sampling = sequence.request, sequence.request.sampling
    drafts = sequence.drafts[:ahead]
    if request.embedding_bias is not None:
        row += request.embedding_bias
    if sampling.temperature not in (0, 1):
        row /= sampling.temperature
    if sequence.counts is not None:
        counts = sequence.counts
        if drafts:
            counts = counts + np.bincount(drafts, minlength=len(counts)).astype(np.int32)
        seen = np.flatnonzero(counts)
        values = row[seen]
        values = np.where(
            values < 0, values * sampling.repetition_penalty, values / sampling.repetition_penalty
        )
        row[seen] = values - sampling.presence_penalty - sampling.frequency_penalty * counts[seen]
    too_short = sequence.generated + ahead < request.min_new_tokens
    if sequence.bad_words or too_short:
        row[_banned(sequence, drafts, too_short)] = -np.inf


def _banned(sequence: Sequence, drafts: list[int], too_short: bool) -> list[int]:
    longest = max(sequence.bad_words.longest, sequence.stop_words.longest)
    tail = sequence.tokens[-longest:] + drafts
    banned = sequence.bad_words.completions(tail)
    if too_short:
        banned += sequence.stop_words.completions(tail)
        if sequence.request.end_id is not None:
            banned.append(sequence.request.end_id)
    return banned


def _top_p(sequence: Sequence, ahead: int) -> float:
    top_p = sequence.top_p
    for token in sequence.drafts[:ahead]:
        top_p = sequence.request.sampling.next_top_p(top_p, token)
    return top_p


def _log_sum_exp(row: Floats) -> np.float64:
    top = row.max()
    return np.float64(top + np.log(np.exp(row - top, dtype=np.float64).sum()))
