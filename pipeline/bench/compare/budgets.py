"""Budgets of a comparison: each is kept, broken, or not shown to be either.

A budget of speed is kept where the 95 % interval of every figure excludes a larger loss, and broken where a one-sided
test, corrected by Holm for all figures, says that a loss is larger. Everything between is not shown: more rounds, or a
longer run, can decide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from pipeline.bench.compare.figures import LENGTH, LoadComparison, MetricComparison
from pipeline.bench.compare.settings import CompareCriteria
from pipeline.bench.result import Section
from pipeline.bench.statistics import ALPHA, holm, share_difference
from pipeline.golden import BudgetCheck

BudgetState = Literal["kept", "over", "not shown"]

# Limits of failures and lengths where a budget of speed is given alone: an answer that fails or ends early is fast.
_UNASKED_FAILED, _UNASKED_LENGTH = 0.01, 0.05


class BudgetResult(Section):
    """A figure and the budget that it was held against."""

    budget: str
    figure: float | None = Field(description="Null where it could not be measured.")
    limit: float
    state: BudgetState = Field(
        description="kept; over; or not shown: what was measured does not tell the two apart."
    )
    text: str

    @classmethod
    def of_answers(cls, check: BudgetCheck) -> BudgetResult:
        """Make the result of a budget of the golden questions; only a missing figure shows nothing."""
        state: BudgetState = "not shown" if check.figure is None else "kept" if check.passed else "over"
        return cls(budget=check.budget, figure=check.figure, limit=check.limit, state=state, text=check.text)


def worst_state(budgets: Sequence[BudgetResult]) -> BudgetState:
    """State of several budgets together: over where one is, else not shown where one is."""
    states = {budget.state for budget in budgets}
    return next((state for state in ("over", "not shown") if state in states), "kept")


def load_budgets(
    loads: Sequence[LoadComparison], criteria: CompareCriteria, looks: int = 1
) -> Iterator[BudgetResult]:
    """Hold speed, failures and lengths of all loads against their budgets.

    Args:
        loads: Figures of both sides.
        criteria: The budgets; one that is not given is not judged.
        looks: Times that the figures are looked at before more rounds are measured; each look may err less.
    """
    alpha = ALPHA / 2 / looks
    speed = criteria.max_regression
    if speed is not None:
        yield _worse("max_regression", loads, speed, alpha, length=False)
    budgeted = criteria.max_length_change is not None
    length = criteria.max_length_change if budgeted else _UNASKED_LENGTH
    if length is not None and (budgeted or speed is not None):
        budget = _worse("max_length_change", loads, length, alpha, length=True)
        if budgeted or budget.state == "over":
            yield budget
    budgeted = criteria.max_more_failed is not None
    failed = criteria.max_more_failed if budgeted else _UNASKED_FAILED
    if failed is not None and (budgeted or speed is not None):
        budget = _more_failed(loads, failed, alpha)
        if budgeted or budget.state == "over":
            yield budget


def _worse(
    budget: str, loads: Sequence[LoadComparison], limit: float, alpha: float, *, length: bool
) -> BudgetResult:
    """Judge how much worse figures are, those of speed or the lengths of answers."""
    judged = [
        (load, metric) for load in loads for metric in load.metrics if (metric.metric == LENGTH) == length
    ]
    lacking = [
        f"{name} with {load.load}" for load in loads for name in load.left_out if (name == LENGTH) == length
    ]
    known = [(load, metric, p) for load, metric in judged if (p := metric.p_over(limit)) is not None]
    lacking += [f"{metric.title} with {load.load}" for load, metric in judged if metric.p_over(limit) is None]
    adjusted = holm([p for *_, p in known])
    over = [(load, metric) for (load, metric, _), p in zip(known, adjusted, strict=True) if p < alpha]
    loose = [(load, metric) for load, metric, p in known if 1 - p >= alpha]
    allowed = f"{limit:.0%} allowed"
    if over:
        load, metric = max(over, key=lambda pair: _loss(pair[1]))
        text = f"{metric.title} with {load.load} is {_changed(metric)}, {allowed}"
        return BudgetResult(budget=budget, figure=_loss(metric), limit=limit, state="over", text=text)
    if loose:
        load, metric = max(loose, key=lambda pair: pair[1].worst or 0.0)
        text = f"{metric.title} with {load.load} may be {metric.worst or 0.0:.1%} {_word(metric)}, {allowed}"
        more = [f"{len(loose) - 1} figures more are open"] if len(loose) > 1 else []
        text = "; ".join([text, *more, *([f"not known: {', '.join(lacking)}"] if lacking else [])])
        return BudgetResult(budget=budget, figure=_loss(metric), limit=limit, state="not shown", text=text)
    if lacking or not known:
        text = f"not known: {', '.join(lacking) or 'no figure was measured on both sides'}"
        return BudgetResult(budget=budget, figure=None, limit=limit, state="not shown", text=text)
    load, metric = max(((load, metric) for load, metric, _ in known), key=lambda pair: pair[1].worst or 0.0)
    text = f"{metric.title} with {load.load} is at most {max(0.0, metric.worst or 0.0):.1%} {_word(metric)}, {allowed}"
    return BudgetResult(budget=budget, figure=_loss(metric), limit=limit, state="kept", text=text)


def _more_failed(loads: Sequence[LoadComparison], limit: float, alpha: float) -> BudgetResult:
    """Judge by how much B's share of failed requests is larger, by Newcombe's interval."""
    budgets = []
    for load in loads:
        (failed_a, failed_b), (count_a, count_b) = load.failed, load.requests
        low, high = share_difference((failed_a, count_a), (failed_b, count_b), 2 * alpha / len(loads))
        figure = failed_b / max(1, count_b) - failed_a / max(1, count_a)
        state: BudgetState = "over" if low > limit else "kept" if high <= limit else "not shown"
        text = f"with {load.load}, B failed {failed_b} of {count_b} requests and A {failed_a} of {count_a}: "
        text += f"{low:+.1%} to {high:+.1%}, {limit:.1%} more allowed"
        budgets.append(
            BudgetResult(budget="max_more_failed", figure=figure, limit=limit, state=state, text=text)
        )
    order = {"over": 2, "not shown": 1, "kept": 0}
    return max(budgets, key=lambda budget: (order[budget.state], budget.figure or 0.0))


def _loss(metric: MetricComparison) -> float:
    return abs(metric.ratio - 1) if metric.more_is_better is None else metric.regression


def _changed(metric: MetricComparison) -> str:
    if metric.more_is_better is None:
        return f"{abs(metric.ratio - 1):.1%} {'longer' if metric.ratio > 1 else 'shorter'}"
    return f"{metric.regression:.1%} worse"


def _word(metric: MetricComparison) -> str:
    return "longer or shorter" if metric.more_is_better is None else "worse"
