"""A comparison of deployments for a terminal: the table, the front drawn with characters, and what to make of both."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.cli.render.speed import basis, number, wrapped
from pipeline.plan.performance.accuracy import (
    Estimate,
    interval_estimate,
)
from pipeline.plan.performance.compare import Comparison, DeploymentOption, FrontPoint

_WIDTH = 110  # of running text
_ROWS = 18  # of the drawing
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_ENDS = {"memory": "memory, limits", "steps": "full steps", "ttft": "first token", "itl": "between tokens"}


def comparison_lines(found: Comparison, *, rows: int) -> Iterator[str]:
    """The best options, so many of them, and why the others are none."""
    question = found.question
    work, slo = question.work, found.recipe.slo
    limits = [
        f"{name} at most {value:g} ms"
        for name, value in (("first token p95", slo.ttft_p95_ms), ("between tokens p95", slo.itl_p95_ms))
        if value is not None
    ]
    yield f"{found.recipe.name}: prompts of {work.prompt_tokens} and answers of {work.output_tokens} tokens"
    yield f"SLO: {', '.join(limits) if limits else 'none'}; ranked by {_measure(found)}, at the most requests within it"
    if question.acceptance is not None:
        yield f"drafts: {question.acceptance:g} of their tokens are accepted"
    elif found.recipe.draft is not None:
        yield "without its draft: --acceptance, the share of its tokens that is accepted, compares it too"
    yield ""
    yield from _table(found, rows)
    yield from _refused(found.refused)
    yield ""
    yield from notes(found, _WIDTH)
    if any(option.unverified for option in found.serving):
        yield "  ?: peak rates of this GPU without a source at hand (contracts/data/gpus.yaml)"


def notes(found: Comparison, width: int) -> Iterator[str]:
    """How sure it is, and of what nobody knows that."""
    bracketed = any(not option.unchecked for option in found.serving)
    yield from basis(width, throughput=bracketed, first_token=False)
    for warning in found.warnings:
        yield from wrapped(f"warning: {warning}", width)


def place_label(place: FrontPoint) -> str:
    """`2 x h100-sxm-80g fp8, 16 requests`."""
    return f"{place.option.label}, {place.load.batch} request{'s' if place.load.batch > 1 else ''}"


def measure_label(found: Comparison) -> str:
    """What is spent, as the name of an axis."""
    unit = "price" if found.question.priced else "GPU-seconds"
    return f"{unit} of a million output tokens"


def spent(option: DeploymentOption, found: Comparison) -> Estimate:
    """For a million output tokens, at the largest load."""
    if found.question.priced and option.cost is not None:
        return interval_estimate(option.cost.per_million_output, checked=not option.unchecked)
    return interval_estimate(option.gpu_seconds, checked=not option.unchecked)


def _measure(found: Comparison) -> str:
    return "price" if found.question.priced else "GPU time (give --price GPU=PER_HOUR to rank by money)"


def _table(found: Comparison, rows: int) -> Iterator[str]:
    if not found.serving:
        yield "  nothing serves a single request within the SLO"
        return
    best = {id(place.option) for place in found.front}
    head = "price / 1M out" if found.question.priced else "GPU-s / 1M out"
    yield (
        f"     {'deployment':<38}{'requests':>8}  {'ended by':<15}{'TTFT p95':>9}{'ITL':>8}{'tokens/s':>10}"
        f"{'a GPU':>8}{head:>16}"
    )
    for index, option in enumerate(found.serving):
        if index < rows or id(option) in best:
            yield _row(index, option, found, on_front=id(option) in best)
    hidden = sum(1 for option in found.serving[rows:] if id(option) not in best)
    if hidden:
        yield f"     … and {hidden} more that serve (--json has all)"
    yield "  *: on the front of time between tokens and what a token takes, at one load or another"


def _row(index: int, option: DeploymentOption, found: Comparison, *, on_front: bool) -> str:
    load = option.best
    assert load is not None, "it serves"
    assert option.forecast is not None, "it serves"
    label = option.label + (" ?" if option.unverified else "")
    taken = spent(option, found)
    return (
        f"{index + 1:>3}{'*' if on_front else ' '} {label:<38}{load.batch:>8}  {_ENDS[option.forecast.ended_by]:<15}"
        f"{number(load.ttft_ms):>6} ms{number(load.itl_ms):>5} ms{number(load.tokens_per_s):>10}"
        f"{number(load.tokens_per_s / option.gpus):>8}"
        f"{number(taken.value):>8}{_ends(taken)}"
    )


def _ends(taken: Estimate) -> str:
    if taken.low is None or taken.high is None:
        return ""
    return f" ({number(taken.low)}-{number(taken.high)})"


def _refused(options: Sequence[DeploymentOption]) -> Iterator[str]:
    """Grouped by reason: how many, and which."""
    groups: dict[str, list[str]] = {}
    for option in options:
        for reason in option.reasons:
            groups.setdefault(_kind(reason), []).append(option.label)
    if groups:
        yield ""
        yield f"  {len(options)} that do not serve (--json says which and why, one by one):"
    for reason, labels in groups.items():
        named = ", ".join(labels[:3]) + (f", … ({len(labels)} in all)" if len(labels) > 3 else "")
        yield f"    {reason}: {named}"


def _kind(reason: str) -> str:
    if reason.startswith("not one sequence"):
        return "do not fit into memory"
    if reason.startswith("first token after"):
        return "first token too late, even alone"
    if "between tokens even alone" in reason:
        return "too slow between tokens, even alone"
    return reason


@dataclass(frozen=True, slots=True)
class Axis:
    """From one value to another, both positive; a little room at the ends."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Axis:
        """That shows all of them."""
        low, high = min(values), max(values)
        room = max((high / low) ** 0.05, 1.1)
        return cls(low / room, high * room)

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def marks(self) -> tuple[float, ...]:
        """1, 2 and 5 times powers of ten between the ends.

        >>> Axis(3, 120).marks()
        (5.0, 10.0, 20.0, 50.0, 100.0)
        """
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = (step * 10.0**power for power in powers for step in (1, 2, 5))
        return tuple(float(f"{value:.6g}") for value in found if self.low <= value <= self.high)


def front_lines(found: Comparison, width: int) -> Iterator[str]:
    """A plot of so many columns, and what its letters are; nothing where nothing serves."""
    if not found.places:
        return
    across = Axis.over([place.load.itl_ms for place in found.places])
    upwards = Axis.over([place.spent for place in found.places])
    columns = max(20, min(width, 110) - 12)
    cells = [[" "] * columns for _ in range(_ROWS)]

    def put(itl_ms: float, spent: float, mark: str) -> None:
        row = _ROWS - 1 - round(upwards.place(spent) * (_ROWS - 1))
        cells[row][round(across.place(itl_ms) * (columns - 1))] = mark

    for place in found.places:
        put(place.load.itl_ms, place.spent, ".")
    marked = list(zip(_LETTERS, found.front, strict=False))
    for letter, place in reversed(marked):
        put(place.load.itl_ms, place.spent, letter)
    labels = {_ROWS - 1 - round(upwards.place(mark) * (_ROWS - 1)): number(mark) for mark in upwards.marks()}
    yield f"  {measure_label(found)}"
    for index, row in enumerate(cells):
        yield f"  {labels.get(index, ''):>7} |{''.join(row).rstrip()}"
    yield f"  {'':>7} +{'-' * columns}"
    yield f"  {'':>9}{_scale(across, columns)}"
    yield f"  {'ms between tokens of one user':>{columns + 9}}"
    for letter, place in marked:
        yield (
            f"  {letter}  {place_label(place)}: {number(place.load.itl_ms)} ms,"
            f" {number(place.load.tokens_per_s)} tokens/s, {number(place.spent)}"
        )


def _scale(axis: Axis, columns: int) -> str:
    line = [" "] * columns
    free = 0
    for mark in axis.marks():
        text, start = number(mark), round(axis.place(mark) * (columns - 1))
        if free <= start <= columns - len(text):
            line[start : start + len(text)] = text
            free = start + len(text) + 1
    return "".join(line).rstrip()
