"""Figures held against the plan, the recipe or the model. Pure: values in, checks out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pipeline.bench.accept.report import AcceptanceCheck, Outcome
from pipeline.plan.memory import MemoryPlan
from pipeline.plan.memory.accuracy import capacity_accuracy
from pipeline.plan.performance.estimates import Estimate
from pipeline.recipe import Slo


def held_to_forecast(
    name: str, value: float, forecast: Estimate | None, unit: str, *, less_is_better: bool = True
) -> AcceptanceCheck:
    """Hold a measured figure against the plan's.

    A figure that is worse than the plan's bracket fails; one that is better passes, and the note says that the plan is
    off. Without a forecast, or without a bracket, it is only reported.
    """
    if forecast is None:
        note = "the plan has no forecast of it"
        return AcceptanceCheck(name, "measured", "", quantity(value, unit), value, unit, note=note)
    bracket = None if forecast.low is None or forecast.high is None else (forecast.low, forecast.high)
    expected = quantity(forecast.value, unit)
    outcome: Outcome = "measured"
    note = "no published figure is of the like, so that the plan has no bracket"
    if bracket is not None:
        expected += f" ({quantity(bracket[0], '')} to {quantity(bracket[1], '')})"
        above, below = value > bracket[1], value < bracket[0]
        worse, better = (above, below) if less_is_better else (below, above)
        outcome = "failed" if worse else "passed"
        note = "better than the plan's bracket: the plan is off" if better else ""
    return AcceptanceCheck(
        name, outcome, expected, quantity(value, unit), value, unit, forecast.value, bracket, note
    )


def at_most(name: str, value: float, limit: float, unit: str, *, note: str = "") -> AcceptanceCheck:
    """Hold a figure to an upper limit in the same unit; the note says where the limit comes from."""
    outcome: Outcome = "passed" if value <= limit else "failed"
    return AcceptanceCheck(
        name, outcome, f"at most {quantity(limit, unit)}", quantity(value, unit), value, unit, note=note
    )


def at_least(name: str, value: float, limit: float, unit: str, *, note: str = "") -> AcceptanceCheck:
    """Hold a figure to a lower limit, as `at_most`."""
    outcome: Outcome = "passed" if value >= limit else "failed"
    return AcceptanceCheck(
        name, outcome, f"at least {quantity(limit, unit)}", quantity(value, unit), value, unit, note=note
    )


def expect(name: str, holds: bool, expected: str, measured: str, note: str = "") -> AcceptanceCheck:
    """Record whether something is as expected; the note says why it matters, or how to read it."""
    return AcceptanceCheck(name, "passed" if holds else "failed", expected, measured, note=note)


def skipped(name: str, note: str) -> AcceptanceCheck:
    """Record that something cannot be checked; the note says why."""
    return AcceptanceCheck(name, "skipped", note=note)


def quantity(value: float, unit: str) -> str:
    """Write a figure for people.

    >>> quantity(12.345, "ms"), quantity(1234567.0, ""), quantity(0.9912, "%")
    ('12.35 ms', '1,234,567', '99.12 %')
    """
    if unit == "%":
        return f"{100 * value:.2f} %"
    digits = 0 if abs(value) >= 1000 or value == int(value) else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


def memory_checks(
    plan: MemoryPlan | None, used_mib: Mapping[str, float], blocks: Mapping[str, float], *, on_gpu: bool
) -> Iterator[AcceptanceCheck]:
    """Hold the memory in use against the plan of memory.

    The plan of memory has no bracket of its own. The largest error that it has on published measurements of GPUs
    (`pipeline plan accuracy`) is taken for one; none of them is of a CPU.

    Args:
        used_mib: GPU (or, on a CPU, process of an engine) -> MiB that it holds more than before the start.
        blocks: Model -> blocks of its KV cache, by Triton's metrics page.
        on_gpu: Whether `used_mib` is of GPUs, in the order of ranks.
    """
    worst = capacity_accuracy().worst

    def estimate(value: float) -> Estimate:
        return Estimate(value, value * (1 - worst), value * (1 + worst)) if on_gpu else Estimate(value)

    for index, (name, value) in enumerate(used_mib.items()):
        planned = None
        if plan is not None and on_gpu and index < len(plan.ranks):
            planned = estimate(plan.ranks[index].used / 2**20)
        elif plan is not None and not on_gpu and len(used_mib) == 1:
            planned = estimate(plan.ranks[0].used / 2**20)
        yield held_to_forecast(f"memory of {name}", value, planned, "MiB")
    for model, value in blocks.items():
        # Layers with windows have blocks of their own, which the page counts too.
        whole = plan is not None and not plan.spec.models[0].windows
        planned = estimate(plan.blocks) if plan is not None and whole else None
        yield held_to_forecast(f"KV cache blocks of {model}", value, planned, "", less_is_better=False)
    if not blocks:
        yield skipped("KV cache blocks", "Triton's metrics page of this runtime does not tell them")


def slo_checks(slo: Slo, ttft_p95_ms: float, itl_p95_ms: float, streams: int) -> Iterator[AcceptanceCheck]:
    """Hold latencies under a load of so many streams to the recipe's SLO; targets that it lacks are not checked."""
    limits: Sequence[tuple[str, float, float | None]] = (
        ("slo.ttft_p95_ms", ttft_p95_ms, slo.ttft_p95_ms),
        ("slo.itl_p95_ms", itl_p95_ms, slo.itl_p95_ms),
    )
    for name, value, limit in limits:
        if limit is not None:
            yield at_most(f"{name}, {streams} streams", value, limit, "ms", note="the SLO of the recipe")
