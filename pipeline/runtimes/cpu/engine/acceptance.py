"""Acceptance of proposed tokens by their probabilities, for drafts that come with the logits they were drawn from.

    keep the proposed token x if p(x) > u q(x), u uniform in (0, 1); else draw one from max(p - q, 0), renormalised

with p the target's distribution and q the draft's. What comes out is distributed as p (Leviathan, Kalman, Matias:
"Fast inference from transformers via speculative decoding", 2023), provided that u tells nothing of how x was drawn:
what is random here comes from streams of its own. With a threshold in place of u, which TensorRT-LLM offers, it is
not. p and q are what is left after all of a request's sampling parameters, applied to both.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .noise import gumbel, stream, uniform

Probabilities = npt.NDArray[np.float64]


def verdict(
    p: Probabilities,
    q: Probabilities,
    token: int,
    *,
    seed: int,
    position: int,
    threshold: float | None = None,
) -> int:
    """The token for a position where `token` was proposed: it, or the one that takes its place.

    `p`, `q`: [vocab_size], each with the sum 1. `seed` and `position` as in `noise`.
    """
    bar = uniform(stream(seed, 1), position) if threshold is None else threshold
    if p[token] > bar * q[token]:
        return token
    rest = np.maximum(p - q, 0)
    rest[token] = 0  # with a threshold above 1, p may exceed q there
    if not rest.any():
        rest = p
    ids = np.flatnonzero(rest)
    noise = gumbel(
        np.full(len(ids), stream(seed, 2), np.uint64),
        np.full(len(ids), position, np.uint64),
        ids.astype(np.uint64),
    )
    return int(ids[(np.log(rest[ids]) + noise).argmax()])
