"""A run in sentences: up to which load the SLO holds, and what speaks against the figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal

from pipeline.bench.result import MAX_FAILED, BenchResult, LevelResult

__all__ = ["Tone", "verdict", "warnings"]

Tone = Literal["good", "mixed", "bad", "none"]
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def verdict(result: BenchResult) -> tuple[Tone, str]:
    """Say in one sentence how a deployment did.

    Returns:
        `good`: all loads held; `mixed`: some did; `bad`: none did; `none`: there is no SLO to hold. And the sentence.
    """
    answered = [level for level in result.levels if level.requests["complete"]]
    if not answered:
        return "bad", "Not one request was answered."
    most = max(answered, key=lambda level: level.output_tokens_per_s)
    if not result.slo:
        return "none", f"The recipe has no SLO; the most was {_figures(most)}, with {most.load}."
    within_slo = [level for level in result.levels if level.holds()]
    missed = [level for level in result.levels if not level.holds()]
    if not within_slo:
        first = min(missed, key=lambda level: level.value)
        return "bad", f"The SLO does not hold at any load: with {first.load}, {_misses(first)}."
    best = max(within_slo, key=lambda level: level.value)
    if not missed:
        return "good", f"The SLO holds at all loads: with {best.load}, {_figures(best)}."
    above = [level for level in missed if level.value > best.value] or missed
    first = min(above, key=lambda level: level.value)
    return "mixed", f"The SLO holds with {best.load}: {_figures(best)}. With {first.load}, {_misses(first)}."


def warnings(result: BenchResult) -> Iterator[str]:
    """Yield reasons to mistrust a run, as sentences without a full stop: those of all loads, then those of some."""
    yield from result.warnings
    alike: dict[tuple[str, ...], list[tuple[LevelResult, str]]] = {}
    for level in result.levels:
        for text in level.warnings:
            alike.setdefault(tuple(_NUMBER.split(text)), []).append((level, text))
    for template, warned in alike.items():
        levels, texts = zip(*warned, strict=True)
        yield f"with {_loads(levels)}: {_joined(template, texts)}"


def _joined(template: Sequence[str], texts: Sequence[str]) -> str:
    """Join texts that differ in numbers alone: "it was 63 to 137 ms late"."""
    ranges = []
    for numbers in zip(*map(_NUMBER.findall, texts), strict=True):
        low, high = min(numbers, key=float), max(numbers, key=float)
        ranges.append(low if low == high else f"{low} to {high}")
    return "".join(part for pair in zip_longest(template, ranges, fillvalue="") for part in pair)


def _loads(levels: Sequence[LevelResult]) -> str:
    """Name loads of one kind together: "1, 2 and 4 at a time"."""
    if len(levels) == 1 or len({level.kind for level in levels}) > 1 or levels[0].kind == "trace":
        return ", and with ".join(str(level.load) for level in levels)
    *first, _ = (f"{level.value:g}" for level in levels)
    return f"{', '.join(first)} and {levels[-1].load}"


def _figures(level: LevelResult) -> str:
    parts = [f"{level.output_tokens_per_s:,.0f} {level.unit}/s"]
    parts += [
        f"{name.upper()} p95 {_ms(latency.p95)}"
        for name in ("ttft", "tpot")
        if (latency := level.latencies.get(name)) is not None
    ]
    if level.stalled:
        parts.append(f"no chunk from any request for {_ms((level.longest_silence_s or 0.0) * 1e3)}")
    return ", ".join(parts)


def _misses(level: LevelResult) -> str:
    parts = []
    for check in level.slo:
        if check.met:
            continue
        name, percentile, _ = check.target.split("_")
        measured = "was not measured" if check.measured is None else f"is {_ms(check.measured)}"
        parts.append(f"{name.upper()} {percentile} {measured} of {_ms(check.wanted)}")
    if level.failed_share > MAX_FAILED:
        parts.append(f"{level.failed_share:.1%} of the requests were not answered")
    return " and ".join(parts)


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"
