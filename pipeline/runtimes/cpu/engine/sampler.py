"""Sampler: turns logits into tokens, for all rows of a step at once.

The order is TensorRT-LLM's: bias, temperature, repetition, presence and frequency penalty, words that must not come,
then min-p, top-k and top-p. The form that an answer must have goes before those words. Where every row is greedy and
nothing else was asked for, it is one argmax.

Random numbers depend on nothing but what they are for: the request's seed, the position, the token. Because the noise
for a position does not depend on who else runs or on whether a draft model helps, neither does the sampled token. Draft
and target choose with the *same* noise, so they choose the same token whenever their distributions agree about it, and
the token that goes out is always the target's own choice. (Daliri, Musco, Suresh: "Coupling without communication and
drafter-invariant speculative decoding", 2024.) The generator is the finalizer of SplitMix64 (Steele, Lea, Flood 2014),
applied to each part of the key in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .sequence import Sequence

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]
Probabilities = npt.NDArray[np.float64]


class SamplingRow(NamedTuple):
    """Position to sample: after the tokens of a sequence and the first `ahead` of its drafts."""

    sequence: Sequence
    ahead: int


class ChosenTokens(NamedTuple):
    """The next token of each row."""

    tokens: list[int]
    log_probs: list[float]  # 0 where the request does not want them


def choose(logits: Floats, rows: list[SamplingRow]) -> ChosenTokens:
    """Choose the next token for each row of `logits` [rows, vocab_size], greedy or sampled as its request says."""
    tokens = logits.argmax(axis=-1).tolist()
    log_probs = [0.0] * len(rows)
    special = [at for at, (sequence, ahead) in enumerate(rows) if not _plain(sequence, ahead)]
    if not special:
        return ChosenTokens(tokens, log_probs)
    picked = [rows[at] for at in special]
    processed = logits[special]  # a copy
    for row, (sequence, ahead) in zip(processed, picked, strict=True):
        _process(row, sequence, ahead)
    chosen = processed.argmax(axis=-1)
    judged = [at for at, row in enumerate(picked) if _has_draft_logits(row)]
    chosen[judged] = [_judge(picked[at], processed[at]) for at in judged]
    sampled = [
        at
        for at, row in enumerate(picked)
        if not row.sequence.request.sampling.greedy and not _has_draft_logits(row)
    ]
    if sampled:
        chosen[sampled] = sample([RandomDraw.of(picked[at], processed[at]) for at in sampled])
    for at, row, token, (sequence, _) in zip(special, processed, chosen.tolist(), picked, strict=True):
        tokens[at] = token
        if sequence.request.log_probs:
            log_probs[at] = float(row[token] - _log_sum_exp(row))
    return ChosenTokens(tokens, log_probs)


def returned_logits(sequence: Sequence, logits: Floats) -> Floats:
    """Return the logits that a request asks for: those of the model, -inf for tokens that its form does not allow.

    Args:
        sequence: The request's sequence, before it gets the chosen tokens.
        logits: [rows, vocab_size] after its tokens, and after each of its drafts that was kept.
    """
    returned = logits.copy()
    for ahead, row in enumerate(returned):
        allowed = None if sequence.matcher is None else sequence.matcher.allowed(sequence.drafts[:ahead])
        if allowed is not None:
            np.copyto(row, -np.inf, where=~allowed)
    return returned


class RandomDraw(NamedTuple):
    """A token to be drawn at random; 0 for `top_k`, `top_p` or `min_p` keeps all tokens."""

    logits: Floats  # [vocab_size]
    top_k: int
    top_p: float
    seed: int
    position: int  # of the token in the answer
    min_p: float = 0.0

    @classmethod
    def of(cls, row: SamplingRow, logits: Floats) -> RandomDraw:
        sequence, ahead = row
        sampling, top_p = sequence.request.sampling, sequence.top_p
        for token in sequence.drafts[:ahead]:
            top_p = sampling.next_top_p(top_p, token)
        position = sequence.generated + ahead
        return cls(logits, sampling.top_k, top_p, sequence.seed, position, sampling.min_p)


def sample(draws: list[RandomDraw]) -> list[int]:
    """Draw a token for each entry, after min-p, top-k and top-p."""
    candidates = [_candidates(draw) for draw in draws]
    sizes = [len(ids) for ids in candidates]
    noise = gumbel(
        np.repeat(np.array([draw.seed for draw in draws], np.uint64), sizes),
        np.repeat(np.array([draw.position for draw in draws], np.uint64), sizes),
        np.concatenate(candidates).astype(np.uint64),
    )
    tokens, at = [], 0
    for draw, ids in zip(draws, candidates, strict=True):
        scores = draw.logits[ids] + noise[at : at + len(ids)]
        tokens.append(int(ids[scores.argmax()]))
        at += len(ids)
    return tokens


def _has_draft_logits(row: SamplingRow) -> bool:
    return row.sequence.draft_logits is not None and row.ahead < len(row.sequence.drafts)


def _judge(row: SamplingRow, logits: Floats) -> int:
    """Accept or replace a token that was proposed with its logits; `logits` are the target's, processed."""
    sequence, ahead = row
    assert sequence.draft_logits is not None
    drafted = sequence.draft_logits[ahead].astype(np.float32)  # a copy
    _process(drafted, sequence, ahead)
    draw = RandomDraw.of(row, logits)
    return accept_or_resample(
        _probabilities(draw),
        _probabilities(draw._replace(logits=drafted)),
        sequence.drafts[ahead],
        seed=draw.seed,
        position=draw.position,
        threshold=sequence.request.draft_threshold,
    )


def _probabilities(draw: RandomDraw) -> Probabilities:
    """Distribution that the token is drawn from, over all tokens."""
    ids = _candidates(draw)
    values = draw.logits[ids].astype(np.float64)
    weights = np.exp(values - values.max())
    shares = np.zeros(len(draw.logits))
    shares[ids] = weights / weights.sum()
    return shares


def _candidates(draw: RandomDraw) -> Ids:
    """The tokens that min-p, top-k and then top-p leave, in no particular order."""
    logits, top_k, top_p = draw.logits, draw.top_k, draw.top_p
    vocab = len(logits)
    if 0 < top_k < vocab:
        ids: Ids = np.argpartition(logits, vocab - top_k)[vocab - top_k :]
    else:
        ids = np.arange(vocab)
    if draw.min_p:
        # The most probable token is always among the first k, so what min-p keeps of them does not depend on the order.
        ids = ids[logits[ids] >= logits[ids].max() + np.log(draw.min_p)]
    if not 0 < top_p < 1:
        return ids
    values = logits[ids]
    weights = np.exp(values - values.max())
    total = float(weights.sum())
    # Tokens below this weight have together less than 1 - top_p, so they are out; few are left to be sorted.
    likely = np.flatnonzero(weights >= (1 - top_p) * total / len(ids))
    likely = likely[np.argsort(-weights[likely], kind="stable")]
    weights = weights[likely].astype(np.float64)
    before = np.cumsum(weights) - weights
    kept: Ids = ids[likely[: max(1, np.count_nonzero(before < top_p * total))]]
    return kept


def _plain(sequence: Sequence, ahead: int) -> bool:
    return sequence.is_plain and sequence.generated + ahead >= sequence.request.min_new_tokens


def _process(row: Floats, sequence: Sequence, ahead: int) -> None:
    """Apply bias, temperature, penalties, the guide and banned tokens to `row` [vocab_size], in place."""
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
        present = np.flatnonzero(counts)
        values = row[present]
        values = np.where(
            values < 0, values * sampling.repetition_penalty, values / sampling.repetition_penalty
        )
        row[present] = values - sampling.presence_penalty - sampling.frequency_penalty * counts[present]
    allowed = None if sequence.matcher is None else sequence.matcher.allowed(drafts)
    if allowed is not None:
        np.copyto(row, -np.inf, where=~allowed)
    too_short = sequence.generated + ahead < request.min_new_tokens
    if sequence.bad_words or too_short:
        _ban(row, _banned(sequence, drafts, too_short), lenient=allowed is not None)


def _ban(row: Floats, tokens: list[int], *, lenient: bool) -> None:
    """Ban tokens in place; a `lenient` ban is dropped if no token would be left."""
    before = row[tokens]
    row[tokens] = -np.inf
    if lenient and row.max() == -np.inf:
        row[tokens] = before


def _banned(sequence: Sequence, drafts: list[int], too_short: bool) -> list[int]:
    longest = max(sequence.bad_words.longest, sequence.stop_words.longest)
    tail = sequence.tokens[-longest:] + drafts
    banned = sequence.bad_words.completions(tail)
    if too_short:
        banned += sequence.stop_words.completions(tail)
        if sequence.request.end_id is not None:
            banned.append(sequence.request.end_id)
    return banned


def _log_sum_exp(row: Floats) -> np.float64:
    top = row.max()
    return np.float64(top + np.log(np.exp(row - top, dtype=np.float64).sum()))


def accept_or_resample(
    p: Probabilities,
    q: Probabilities,
    token: int,
    *,
    seed: int,
    position: int,
    threshold: float | None = None,
) -> int:
    """Accept the proposed token by rejection sampling, or draw its replacement.

        keep the proposed token x if p(x) > u q(x), u uniform in (0, 1); else draw one from max(p - q, 0), renormalised

    with p the target's distribution and q the draft's. What comes out is distributed as p (Leviathan, Kalman, Matias:
    "Fast inference from transformers via speculative decoding", 2023), provided that u is independent of how x
    was drawn; random numbers here come from streams of their own. With a threshold in place of u, which TensorRT-LLM
    offers, it is not. p and q are what is left after all of a request's sampling parameters, applied to both.

    Args:
        p: [vocab_size], sums to 1.
        q: [vocab_size], sums to 1.
        token: The proposed one.
        seed: Seed of the request, see `gumbel`.
        position: Position of the token in the answer, see `gumbel`.
        threshold: In place of u; None for a random number.
    """
    bar = uniform(stream(seed, 1), position) if threshold is None else threshold
    if p[token] > bar * q[token]:
        return token
    residual = np.maximum(p - q, 0)
    residual[token] = 0  # with a threshold above 1, p may exceed q there
    if not residual.any():
        residual = p
    ids = np.flatnonzero(residual)
    noise = gumbel(
        np.full(len(ids), stream(seed, 2), np.uint64),
        np.full(len(ids), position, np.uint64),
        ids.astype(np.uint64),
    )
    return int(ids[(np.log(residual[ids]) + noise).argmax()])


U64 = npt.NDArray[np.uint64]


def gumbel(seeds: U64, positions: U64, tokens: U64) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise; the three arrays broadcast. argmax(log p + gumbel) is a sample from p."""
    bits = _mix(_mix(_mix(seeds) ^ positions) ^ tokens)
    noise: npt.NDArray[np.float64] = -np.log(-np.log(_uniform(bits)))
    return noise


def stream(seed: int, number: int) -> int:
    """Derive the seed of an independent stream of random numbers."""
    return (seed + number * 0x5851F42D4C957F2D) & 0xFFFFFFFFFFFFFFFF


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) for a position."""
    return float(_uniform(_mix(_mix(np.array([seed], np.uint64)) ^ np.uint64(position)))[0])


def _uniform(bits: U64) -> npt.NDArray[np.float64]:
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # in (0, 1), never 0 or 1


def _mix(x: U64) -> U64:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
