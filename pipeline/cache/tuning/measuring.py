"""Labelled pairs as a cache would judge them: the value that a threshold is about, and what every check says.

Shares are counted with Wilson's score interval (E. B. Wilson, 1927), which holds for few counts, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.backend import Vector
from pipeline.cache.tuning.pairs import Pair


@dataclass(frozen=True, slots=True)
class CountedShare:
    """A count out of a total, with its confidence interval.

    >>> share = CountedShare(0, 150)
    >>> f"{share.value:.3f} ({share.low():.3f} to {share.high():.3f})"
    '0.000 (0.000 to 0.025)'
    """

    count: int
    of: int

    @property
    def value(self) -> float:
        """The share; 0 of nothing is 0."""
        return self.count / self.of if self.of else 0.0

    def low(self, confidence: float = 0.95) -> float:
        """Lower end of the two-sided interval."""
        return self._interval(confidence)[0]

    def high(self, confidence: float = 0.95) -> float:
        """Upper end of the two-sided interval; 1 if nothing was counted."""
        return self._interval(confidence)[1]

    def _interval(self, confidence: float) -> tuple[float, float]:
        if not self.of:
            return 0.0, 1.0
        z2 = _z(confidence) ** 2
        middle = self.value + z2 / (2 * self.of)
        spread = math.sqrt(z2 * (self.value * (1 - self.value) + z2 / (4 * self.of)) / self.of)
        scale = 1 + z2 / self.of
        low, high = (middle - spread) / scale, (middle + spread) / scale
        return (0.0 if self.count == 0 else low), (1.0 if self.count == self.of else high)


def pairs_needed(budget: float, confidence: float = 0.95) -> int:
    """Return how many traps, none of them served, put the upper end of the interval at the budget.

    >>> pairs_needed(0.01)
    381
    """
    return math.ceil(_z(confidence) ** 2 * (1 - budget) / budget)


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


Embed = Callable[[str], Vector | None]
# The setting whose threshold is chosen.
Dial = Literal["min_similarity", "min_score"]


class InspectableVerifier(Protocol):
    """A verifier whose checks can be asked one by one."""

    @property
    def checks_alone(self) -> tuple[str, ...]:
        """Names of the checks that refuse a hit by themselves."""

    def objecting(self, asked: str, kept: str, similarity: float) -> tuple[bool, ...]:
        """Return for each of them whether it objects."""

    @property
    def dial(self) -> Dial:
        """The setting whose threshold `value` must reach for a hit."""

    def value(self, asked: str, kept: str, similarity: float) -> float:
        """Rate two questions: the higher, the likelier one answer serves both."""


# The value of a pair that is not looked up: too long for the embedder, or not near.
NEVER = -math.inf
# Thresholds that are tried.
STEPS: Mapping[Dial, tuple[float, ...]] = {
    "min_similarity": tuple(round(0.45 + step / 100, 2) for step in range(55)),
    "min_score": tuple(round(-3 + step / 10, 1) for step in range(81)),
}


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """What a cache would do with the pairs at one setting."""

    threshold: float
    recall: CountedShare  # of the pairs that one answer serves
    false: CountedShare  # of the traps


@dataclass(frozen=True, slots=True)
class Measured:
    """What every check and the threshold say of every pair; rows are pairs."""

    pairs: Sequence[Pair]
    values: NDArray[np.float64]  # [pairs] that the threshold is about: cosine, or the score
    objects: NDArray[np.bool_]  # [pairs, checks] whether the check objects
    checks: tuple[str, ...]  # that refuse a hit by themselves
    dial: Dial = "min_similarity"
    min_similarity: float = 0.5  # cosine that every hit needs

    @property
    def steps(self) -> tuple[float, ...]:
        """Thresholds to choose from, ascending."""
        return STEPS[self.dial]

    def outcome(
        self, threshold: float, skipped: Collection[str] = (), rows: NDArray[np.bool_] | None = None
    ) -> PairOutcome:
        """Count what would be served at a threshold, with all checks but the skipped ones, among some rows or all."""
        served, same = self._passing(threshold, skipped), self.same
        among = np.ones(len(same), np.bool_) if rows is None else rows
        return PairOutcome(
            threshold,
            recall=CountedShare(int((served & same & among).sum()), int((same & among).sum())),
            false=CountedShare(int((served & ~same & among).sum()), int((~same & among).sum())),
        )

    @property
    def same(self) -> NDArray[np.bool_]:
        """The labels, bool [pairs]."""
        return np.array([pair.same for pair in self.pairs], np.bool_)

    def served(self, threshold: float, skipped: Collection[str], *, same: bool) -> list[Pair]:
        """Return the pairs of one label that would be served."""
        passed = self._passing(threshold, skipped)
        return [pair for pair, yes in zip(self.pairs, passed, strict=True) if yes and pair.same is same]

    def _passing(self, threshold: float, skipped: Collection[str]) -> NDArray[np.bool_]:
        kept = [at for at, name in enumerate(self.checks) if name not in skipped]
        passing: NDArray[np.bool_] = (self.values >= threshold) & ~self.objects[:, kept].any(axis=1)
        return passing


def measure(
    pairs: Sequence[Pair], embed: Embed, verifier: InspectableVerifier, *, min_similarity: float
) -> Measured:
    """Embed and check every pair, one after another.

    Args:
        pairs: labelled pairs.
        embed: text to embedding; None if the text is too long.
        verifier: its checks and its value are recorded.
        min_similarity: cosine that every hit needs, where it is not the setting that is chosen.
    """
    floor = 0.0 if verifier.dial == "min_similarity" else min_similarity
    values = np.full(len(pairs), NEVER)
    objects = np.empty((len(pairs), len(verifier.checks_alone)), np.bool_)
    for row, pair in enumerate(pairs):
        near = cosine(embed(pair.a), embed(pair.b))
        objects[row] = verifier.objecting(pair.a, pair.b, near)
        if near >= floor:
            values[row] = verifier.value(pair.a, pair.b, near)
    return Measured(pairs, values, objects, verifier.checks_alone, verifier.dial, floor)


def cosine(one: Vector | None, other: Vector | None) -> float:
    """Return the cosine of two embeddings; -1 if one of the texts has none."""
    return -1.0 if one is None or other is None else float(one @ other)
