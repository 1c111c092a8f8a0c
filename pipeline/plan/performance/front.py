"""The Pareto front: of some points, those that no other beats in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Point = TypeVar("Point")


def front(
    points: Sequence[Point], first: Callable[[Point], float], second: Callable[[Point], float]
) -> list[Point]:
    """Points that none is better than in one and at least as good in the other; less is better in both.

    In order of `first`. Of points that are alike in both, the first.

    >>> front([(1, 5), (2, 3), (3, 4), (4, 1), (2, 3)], lambda p: p[0], lambda p: p[1])
    [(1, 5), (2, 3), (4, 1)]
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (first(one), second(one))):
        if not kept or second(point) < second(kept[-1]):
            kept.append(point)
    return kept
