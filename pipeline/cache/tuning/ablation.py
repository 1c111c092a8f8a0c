"""What each check is worth, and how each kind of pair fares, at one setting."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from pipeline.cache.tuning.measuring import Measured, Outcome


@dataclass(frozen=True, slots=True)
class Weight:
    """Pairs above the threshold to which one check objects, and no other that is on."""

    check: str
    stopped: int  # traps that would be served without it
    lost: int  # pairs that would rightly be served without it


def weigh(measured: Measured, threshold: float, skipped: Collection[str] = ()) -> tuple[Weight, ...]:
    """Every check that is on, in their order."""
    used = [at for at, name in enumerate(measured.checks) if name not in skipped]
    objects = measured.objects[:, used]
    alone = objects & (objects.sum(axis=1) == 1)[:, None] & (measured.values >= threshold)[:, None]
    stopped = (alone & ~measured.same[:, None]).sum(axis=0).tolist()
    lost = (alone & measured.same[:, None]).sum(axis=0).tolist()
    return tuple(
        Weight(measured.checks[at], *counts) for at, *counts in zip(used, stopped, lost, strict=True)
    )


def by_category(measured: Measured, threshold: float, skipped: Collection[str] = ()) -> dict[str, Outcome]:
    """Each category that the pairs name, sorted; pairs without one are left out."""
    categories = np.array([pair.category for pair in measured.pairs])
    return {
        name: measured.outcome(threshold, skipped, categories == name)
        for name in sorted(set(categories.tolist()) - {""})
    }
