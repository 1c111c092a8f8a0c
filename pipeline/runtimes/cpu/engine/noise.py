"""Random numbers that depend on nothing but what they are for: the request's seed, the position, the token.

Because the noise for a position does not depend on who else runs or on whether a draft model helps, neither does the
sampled token. Draft and target choose with the *same* noise, so they choose the same token whenever their
distributions agree about it, and the token that goes out is always the target's own choice. (Daliri, Musco, Suresh:
"Coupling without communication and drafter-invariant speculative decoding", 2024.)

The generator is the finalizer of SplitMix64 (Steele, Lea, Flood 2014), applied to each part of the key in turn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


def gumbel(seeds: U64, positions: U64, tokens: U64) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise; the three arrays broadcast. argmax(log p + gumbel) is a sample from p."""
    bits = _mix(_mix(_mix(seeds) ^ positions) ^ tokens)
    noise: npt.NDArray[np.float64] = -np.log(-np.log(_uniform(bits)))
    return noise


def stream(seed: int, number: int) -> int:
    """The seed of another stream of numbers, which tell nothing of those of the first."""
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
