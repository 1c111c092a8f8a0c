"""Measurements that others published, and what the model says of its own error."""

from __future__ import annotations

from datetime import date
from itertools import groupby

import numpy as np
import pytest

from pipeline.cli.render.forecast_errors import accuracy_page
from pipeline.cli.render.speed import forecast_lines
from pipeline.contracts.gpus import gpu
from pipeline.contracts.models import known_model
from pipeline.plan.memory import DeploymentSpec, ModelSpec, deployment_spec
from pipeline.plan.model_facts import offline_sizes
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance import Workload, forecast
from pipeline.plan.performance.accuracy import compute_figure, speculation_checks
from pipeline.plan.performance.calibration import recipe_model
from pipeline.plan.performance.constants import fitted_constants
from pipeline.plan.performance.estimates import (
    COVERAGE,
    MANY_SET_UPS,
    QUANTITIES,
    Trust,
    figure_classes,
    joint_errors,
)
from pipeline.plan.performance.published import figure_source, figures
from pipeline.recipe import CpuRuntime, Slo, load_recipe, packaged


def need(name: str = "meta-llama/Llama-3.1-8B-Instruct", form: str = "fp8", **split: int) -> ModelSpec:
    sizes = known_model(name)
    assert sizes is not None
    return ModelSpec("target", sizes, Parallelism(**split), form, "fp8")


def test_a_sample_of_measurements_is_met_as_the_classes_say() -> None:
    """A few: constants that were not fitted anew after the model has changed are off."""
    ratios: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for figure in figures()[::36]:
        computed = compute_figure(figure)
        for name, value in figure.measured.items():
            ratios[name].append(abs(computed[name] / value - 1))
    assert np.median(ratios["throughput"]) < 0.12
    assert np.median(ratios["tpot"]) < 0.10
    assert np.median(ratios["ttft-loaded"]) < 0.35
    assert date.fromisoformat(fitted_constants()["fitted"]["on"])


def test_classes_are_of_the_measurements_that_there_are() -> None:
    counts: dict[tuple[str, ...], int] = {}
    checked = 0
    for figure in figures():
        if figure.check and figure.context is None:
            checked += len(figure.measured)
            continue
        for name in figure.measured:
            key = (name, *figure.group)
            counts[key] = counts.get(key, 0) + 1
    stored = {
        (
            figure_class.quantity,
            figure_class.structure,
            figure_class.format,
            figure_class.generation,
        ): figure_class.count
        for figure_class in figure_classes()
    }
    assert stored == {key: count for key, count in counts.items() if count >= 5}
    assert all(figure_class.low <= 1 <= figure_class.high for figure_class in figure_classes())
    assert sum(figure_class["count"] for figure_class in fitted_constants()["checks"]) == checked


def test_brackets_hold_four_of_five_set_ups_that_they_were_not_set_by() -> None:
    found = [
        (one, one.covered, one.covered_error)
        for one in figure_classes()
        if one.covered is not None and one.covered_error is not None
    ]
    assert len(found) >= 35
    # As near as so many set-ups can tell.
    assert all(abs(share - COVERAGE) <= max(0.05, 2 * error) for _, share, error in found)
    assert all(
        abs(share - COVERAGE) <= 0.05
        for one, share, _ in found
        if one.tells_coverage or one.set_ups >= MANY_SET_UPS
    )
    # A class of few set-ups may have one of them too many or too few beyond an end ...
    few = [(share, one.set_ups) for one, share, _ in found if one.set_ups < MANY_SET_UPS]
    assert all(abs(share - COVERAGE) * set_ups < 2 for share, set_ups in few)
    assert sum(one.tells_coverage for one, _, _ in found) >= 3
    text = accuracy_page(as_json=False)
    assert "too few set-ups" in text
    for one, share, error in found:
        told = f"{one.name:<43} {one.count:>5} {one.set_ups:>7} {one.mean:>6.1%}"
        line = next(line for line in text.splitlines() if told in line)
        assert f"{share:.0%} ±{error:.0%}{'' if one.tells_coverage else '?'} " in line


def test_classes_together_meet_what_they_are_meant_to() -> None:
    joint = {(one.quantity, one.members): one for one in joint_errors()}
    # ... all of these together tell more, quantity by quantity.
    for one in joint.values():
        classes = [each for each in figure_classes() if each.quantity == one.quantity]
        chosen = {
            "dense": [each for each in classes if each.structure.startswith("dense")],
            "sparse": [each for each in classes if each.structure.startswith("sparse")],
            "small": [each for each in classes if each.set_ups < MANY_SET_UPS],
        }[one.members]
        assert one.classes == len(chosen)
        assert one.count == sum(each.count for each in chosen)
        assert one.mean == pytest.approx(sum(each.mean * each.count for each in chosen) / one.count, abs=1e-3)
        assert one.covered == pytest.approx(COVERAGE, abs=0.05)
    tokens, first = joint["tpot", "dense"], joint["ttft-loaded", "dense"]
    assert tokens.mean <= 0.09
    assert tokens.p90 <= 0.2
    assert joint["tpot", "sparse"].mean <= 0.15
    assert joint["tpot", "sparse"].p90 <= 0.35
    assert max(first.median, joint["ttft-loaded", "sparse"].median) <= 0.3
    assert max(first.p90, joint["ttft-loaded", "sparse"].p90) <= 0.8


def test_gains_of_prediction_layers_come_near_the_published_ones() -> None:
    found = speculation_checks()
    assert [figure_class.layers for figure_class in found] == [1, 2, 3, 4, 5]
    assert all(abs(figure_class.error) < 0.25 for figure_class in found)
    # No gain is more than the tokens that a round yields.
    assert all(figure_class.computed < figure_class.tokens for figure_class in found)


def test_nothing_is_measured_twice() -> None:
    rows = sorted(
        (figure_class.source, figure_class.label, figure_class.rate, tuple(figure_class.measured.items()))
        for figure_class in figures()
    )
    assert [key for key, same in groupby(rows) if len(list(same)) > 1] == []
    assert all(figure_source(figure) for figure in figures())


def test_a_forecast_brackets_what_measurements_check() -> None:
    device = gpu("h100-sxm-80g")
    demand = DeploymentSpec(device.name, device.driver_mib * 2**20, (need(),), 2560, concurrency=32)
    seen = forecast(demand, "pytorch", Workload(2048, 512), Slo(ttft_p95_ms=2000, itl_p95_ms=80))
    assert seen is not None
    for estimate in (seen.ttft_ms, seen.itl_ms, seen.tokens_per_s):
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < estimate.value < estimate.high
    assert seen.unchecked == seen.warnings == ()
    assert seen.curve[0].batch == 1
    assert seen.curve[-1].batch == seen.concurrency == 32
    assert seen.meets_slo is True
    assert seen.ended_by == "limits"
    assert seen.lifted is not None
    assert seen.lifted.batch > 32
    assert seen.gains == ()
    assert all(len(line) <= 60 for line in forecast_lines(seen, 60))


def test_replicas_for_a_rate() -> None:
    device = gpu("h100-sxm-80g")
    demand = DeploymentSpec(device.name, device.driver_mib * 2**20, (need(),), 1500, concurrency=64)
    slo, work = Slo(ttft_p95_ms=500, itl_p95_ms=40), Workload(1000, 300)
    few, many = (
        forecast(demand, "pytorch", work, slo, requests_per_s=rate, gpu_w=700, gpu_hour=2.0)
        for rate in (3, 90)
    )
    assert few is not None
    assert many is not None
    assert few.rate is not None
    assert many.rate is not None
    assert few.rate.replicas == 1
    assert many.rate.replicas is not None
    assert many.rate.replicas * many.rate.each >= 90 > (many.rate.replicas - 1) * many.rate.each
    assert many.rate.load is not None
    assert many.rate.load.settled_ttft.p95 <= 500 * 1.1
    row = many.as_json()["rate"]
    assert row["price_per_hour"] == 2.0 * many.rate.replicas  # type: ignore[index,call-overload]
    assert row["kw"] == pytest.approx(0.7 * many.rate.replicas)  # type: ignore[index,call-overload]
    impossible = forecast(demand, "pytorch", work, Slo(itl_p95_ms=0.1), requests_per_s=3)
    assert impossible is not None
    assert impossible.rate is not None
    assert impossible.rate.replicas is None
    assert impossible.meets_slo is False


def test_what_does_not_fit_has_no_forecast() -> None:
    large = need("meta-llama/Llama-3.3-70B-Instruct", "none")
    demand = DeploymentSpec("l4-24g", 24 * 2**30, (large,), 4096, concurrency=1)
    assert forecast(demand, "pytorch", Workload(1000, 100), Slo()) is None


@pytest.mark.parametrize(
    ("doubt", "model", "device", "speculates"),
    [
        ("dense models in int4_awq on h100-sxm-80g", need(form="int4_awq"), "h100-sxm-80g", False),
        ("dense models in w4a8_awq on h100-sxm-80g", need(form="w4a8_awq"), "h100-sxm-80g", False),
        ("sparse models in int8_sq on a100-sxm-80g", need("mistralai/Mixtral-8x7B-Instruct-v0.1", "int8_sq"),
         "a100-sxm-80g", False),
        ("8 pipeline stages", need(pipeline=8), "h100-sxm-80g", False),
        ("speculation", need(), "h100-sxm-80g", True),
    ],
)  # fmt: skip
def test_what_no_measurement_is_of_has_no_bracket(
    doubt: str, model: ModelSpec, device: str, speculates: bool
) -> None:
    trust = Trust.of(model, device, speculates=speculates)
    for quantity in QUANTITIES:
        assert not trust.checks(quantity)
        assert trust.estimate(quantity, 1.0).low is None
        assert trust.unchecked(quantity) == (doubt,)
    assert Trust.of(need(), "h100-sxm-80g").checks("tpot")


def test_the_page_says_what_is_not_checked() -> None:
    demand = DeploymentSpec("h100-sxm-80g", 81559 * 2**20, (need(form="w4a8_awq"),), 1100, 32)
    seen = forecast(demand, "tensorrt", Workload(1000, 100), Slo(ttft_p95_ms=1000))
    assert seen is not None
    assert seen.tokens_per_s is not None
    assert seen.tokens_per_s.low is seen.tokens_per_s.high is seen.ttft_ms.low is None
    text = " ".join(" ".join(forecast_lines(seen, 100)).split())
    assert text.count("dense models in w4a8_awq") == 1
    assert "not checked" in text
    row = seen.as_json()["tokens_per_s"]
    assert row == {"value": row["value"], "low": None, "high": None}  # type: ignore[index,call-overload]


@pytest.mark.parametrize("name", sorted(packaged()))
def test_packaged_recipes_meet_their_slo_by_their_plan_or_say_that_they_miss_it(name: str) -> None:
    recipe = load_recipe(name, ())
    sizes = offline_sizes(recipe)
    if isinstance(recipe.runtime, CpuRuntime):
        pytest.skip("how fast a processor is shows only by measuring")
    spec = deployment_spec(recipe, sizes)
    assert spec is not None, "sizes of packaged recipes are among the data"
    work = Workload(recipe.limits.max_input_tokens, recipe.limits.max_output_tokens)
    load = recipe_model(recipe, spec, None).service(None, waves=3).at(recipe.limits.max_concurrency, work)
    text = packaged()[name].read_text("utf-8")
    assert load.broken(recipe.slo) is None or "its plan misses this" in text
