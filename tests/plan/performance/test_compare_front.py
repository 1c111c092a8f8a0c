"""Deployments side by side: the ranking and the front."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from pipeline.plan.model_facts import offline_sizes
from pipeline.plan.performance import Workload
from pipeline.plan.performance.compare import (
    Comparison,
    ComparisonSettings,
    compare,
    comparison_settings,
    pareto_front,
)
from pipeline.plan.settings import ComparisonOptions
from pipeline.recipe import Recipe, Slo, load_recipe
from tests.support.tensorrt import DRAFTED

DEVICES = ("h100-sxm-80g", "l40s-48g", "a100-sxm-80g", "l4-24g")
QUESTION = ComparisonSettings(
    Workload(1000, 200), DEVICES, dict(zip(DEVICES, (2.5, 1.0, 1.5, 0.5), strict=True)), 0.8
)


@cache
def recipe() -> Recipe:
    return load_recipe("llama-3.1-8b-fp8", DRAFTED)


def ask(question: ComparisonSettings = QUESTION, of: Recipe | None = None) -> Comparison:
    chosen = of or recipe()
    return compare(chosen, offline_sizes(chosen), question)


@cache
def found() -> Comparison:
    return ask()


def test_every_combination_is_ranked_or_refused_with_a_reason() -> None:
    seen = found()
    labels = [option.label for option in (*seen.serving, *seen.refused)]
    assert len(set(labels)) == len(labels)
    assert {option.gpu for option in (*seen.serving, *seen.refused)} == set(DEVICES)
    assert "1 x l40s-48g fp8 + draft" in labels
    assert "1 x a100-sxm-80g fp8" not in labels  # Ampere has no FP8
    assert all(option.reasons and option.best is None for option in seen.refused)
    assert all(not option.reasons and option.cost for option in seen.serving)
    # Those that measurements check come first.
    ranks = [
        (bool(option.unchecked), option.cost.per_million_output) for option in seen.serving if option.cost
    ]
    assert ranks == sorted(ranks)


def test_the_best_loads_meet_the_slo() -> None:
    slo = recipe().slo
    assert slo.ttft_p95_ms
    assert slo.itl_p95_ms
    for place in found().places:
        assert place.load.ttft_ms <= slo.ttft_p95_ms
        assert place.load.itl_p95_ms <= slo.itl_p95_ms
    for option in found().serving:
        assert option.best
        assert 1 <= option.best.batch <= option.sequences


def test_nothing_beats_the_front() -> None:
    seen = found()
    assert seen.front
    for kept in seen.front:
        for other in seen.places:
            assert not (other.load.itl_ms < kept.load.itl_ms and other.spent < kept.spent)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_a_front_is_what_no_other_point_beats(points: list[tuple[int, int]]) -> None:
    kept = pareto_front(points, lambda point: point[0], lambda point: point[1])
    for point in points:
        beaten = any(p != point and p[0] <= point[0] and p[1] <= point[1] for p in points)
        assert (point in kept) == (not beaten)
    assert kept == sorted(set(kept))


def test_a_price_moves_the_ranking_and_nothing_else() -> None:
    dear = ask(replace(QUESTION, prices={**QUESTION.prices, "h100-sxm-80g": 250.0}))
    assert dear.serving[0].gpu != "h100-sxm-80g"
    assert {option.label for option in dear.serving} == {option.label for option in found().serving}


def test_without_prices_gpu_time_ranks_and_without_acceptance_no_draft_is_there() -> None:
    seen = ask(replace(QUESTION, prices={"l4-24g": 0.5}, acceptance=None))
    times = [(bool(option.unchecked), option.gpu_seconds) for option in seen.serving]
    assert times == sorted(times)
    assert not any(option.draft for option in (*seen.serving, *seen.refused))
    assert [option.gpu for option in seen.serving if option.cost] == ["l4-24g"] * sum(
        option.gpu == "l4-24g" for option in seen.serving
    )


def test_an_slo_that_nothing_meets_is_said_to_be_missed() -> None:
    strict = recipe().model_copy(update={"slo": Slo(itl_p95_ms=0.001)})
    seen = ask(of=strict)
    assert not seen.serving
    assert not seen.front


def test_devices_are_those_asked_for_then_those_with_a_price_then_all() -> None:
    limits = recipe().limits
    asked = ComparisonOptions(devices=("l4-24g",), prices={"h200-sxm-141g": 3.0})
    assert comparison_settings(asked, limits).devices == ("l4-24g",)
    assert comparison_settings(ComparisonOptions(prices={"h200-sxm-141g": 3.0}), limits).devices == (
        "h200-sxm-141g",
    )
    assert len(comparison_settings(ComparisonOptions(), limits).devices) > 20
    assert comparison_settings(ComparisonOptions(), limits).work == Workload(8192, 1024)
