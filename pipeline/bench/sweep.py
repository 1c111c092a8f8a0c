"""One load after the other: those that were asked for, or doubled until the SLO breaks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from pipeline.bench.arrivals import Load
from pipeline.bench.result import LevelResult

MAX_FAILED = 0.01  # share of requests; beyond it a load is too much, whatever those that were answered saw
_NARROWING = 3  # halvings between the last load that held and the first that did not


async def run_levels(loads: Iterable[Load], measure: Callable[[Load], Awaitable[LevelResult]]) -> None:
    """Measure the loads that were asked for, one after the other."""
    for load in loads:
        await measure(load)


async def find_limit(
    first: Load, most: float, measure: Callable[[Load], Awaitable[LevelResult]]
) -> float | None:
    """Double a load until it misses the SLO, then halve the step between what held and what did not.

    Args:
        first: The smallest load.
        most: The largest that is tried.
        measure: Measures one.

    Returns:
        The smallest load that missed the SLO; None if none did.
    """
    held, broke, value = 0.0, None, first.value
    while broke is None:
        if not holds(await measure(Load(first.kind, value))):
            broke = value
        elif (held := value) >= most:
            return None
        value = min(2 * value, most)
    for _ in range(_NARROWING):
        middle = (held + broke) / 2 if first.open else (held + broke) // 2
        if not held or middle in (held, broke):
            break
        good = holds(await measure(Load(first.kind, middle)))
        held, broke = (middle, broke) if good else (held, middle)
    return broke


def holds(level: LevelResult, max_failed: float = MAX_FAILED) -> bool:
    """Whether a load is within the SLO, and no more than a share of its requests failed."""
    return level.within_slo and level.failed_share <= max_failed
