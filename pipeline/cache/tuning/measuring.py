"""Labelled pairs, each with its similarity and what every check says of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.backend import Vector
from pipeline.cache.tuning.intervals import Share
from pipeline.cache.tuning.pairs import Pair

Embed = Callable[[str], Vector | None]


class Parted(Protocol):
    """A verifier of which each part can be asked by itself."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of checks, or what else may object."""

    def objecting(self, asked: str, kept: str, similarity: float) -> tuple[bool, ...]:
        """Which of the parts object."""


NEVER = -1.0  # the similarity of a question that is too long for the embedder: it is not looked up


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cache would do with the pairs at one setting."""

    min_similarity: float
    recall: Share  # of the pairs that one answer serves
    false: Share  # of the traps


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows are pairs."""

    pairs: Sequence[Pair]
    similarity: NDArray[np.float64]  # [pairs] cosine
    objects: NDArray[np.bool_]  # [pairs, checks] whether the check objects
    checks: tuple[str, ...]  # parts of a verifier: the learned scorer is one, where it decides

    def outcome(
        self, min_similarity: float, skipped: Collection[str] = (), rows: NDArray[np.bool_] | None = None
    ) -> Outcome:
        """At one threshold, with all checks but the skipped ones; of some rows only, if they are given."""
        kept = [at for at, name in enumerate(self.checks) if name not in skipped]
        served = (self.similarity >= min_similarity) & ~self.objects[:, kept].any(axis=1)
        same = self.same
        among = np.ones(len(same), np.bool_) if rows is None else rows
        return Outcome(
            min_similarity,
            recall=Share(int((served & same & among).sum()), int((same & among).sum())),
            false=Share(int((served & ~same & among).sum()), int((~same & among).sum())),
        )

    @property
    def same(self) -> NDArray[np.bool_]:
        """[pairs] the labels."""
        return np.array([pair.same for pair in self.pairs], np.bool_)

    def served(self, min_similarity: float, skipped: Collection[str], *, same: bool) -> list[Pair]:
        """The pairs of one label that would be served."""
        kept = [at for at, name in enumerate(self.checks) if name not in skipped]
        passed = (self.similarity >= min_similarity) & ~self.objects[:, kept].any(axis=1)
        return [pair for pair, yes in zip(self.pairs, passed, strict=True) if yes and pair.same is same]


def measure(pairs: Sequence[Pair], embed: Embed, verifier: Parted) -> Measured:
    """Embed and check every pair, one after another."""
    similarity = np.empty(len(pairs))
    objects = np.empty((len(pairs), len(verifier.parts)), np.bool_)
    for row, pair in enumerate(pairs):
        similarity[row] = near = cosine(embed(pair.a), embed(pair.b))
        objects[row] = verifier.objecting(pair.a, pair.b, near)
    return Measured(pairs, similarity, objects, verifier.parts)


def cosine(one: Vector | None, other: Vector | None) -> float:
    """`NEVER` if one of the texts has no embedding."""
    return NEVER if one is None or other is None else float(one @ other)
