"""Constants fitted to measured loads: what was measured is found again, what was not stays, and errors are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import InvalidInput
from pipeline.plan.memory import DeploymentSpec, deployment_spec
from pipeline.plan.model_facts import offline_sizes
from pipeline.plan.performance import Workload, forecast_recipe
from pipeline.plan.performance.calibration import (
    MeasuredLoad,
    SpeedCalibration,
    calibration_file,
    model_name,
    recipe_model,
)
from pipeline.plan.performance.constants import Efficiency
from pipeline.plan.performance.engine import token_acceptance, tokens_per_round
from pipeline.plan.performance.fit import CalibrationFit, fit_calibration
from pipeline.recipe import Recipe, load_recipe

pytest.importorskip("scipy")

LOADS = (1, 4, 16, 48)
WORK = Workload(1000, 200)


def recipe() -> Recipe:
    return load_recipe("llama-3.1-8b-fp8", ()).model_copy(update={"draft": None})


def spec() -> DeploymentSpec:
    found = deployment_spec(recipe(), {"target": offline_sizes(recipe())["target"]})
    assert found is not None
    return found


def slower(constants: Efficiency) -> Efficiency:
    """A machine that is not what was published."""
    return replace(constants, memory=0.7 * constants.memory, step_s=1.8 * constants.step_s, request_s=0.02)


def measured(loads: tuple[int, ...] = LOADS, work: Workload = WORK) -> list[MeasuredLoad]:
    """What such a machine would show."""
    model = recipe_model(recipe(), spec(), None)
    service = model.service(None, slower(model.constants))
    points = [service.at(load, work) for load in loads]
    return [
        MeasuredLoad(
            "bench.json", point.batch, work, point.ttft_ms, point.ttft_ms, point.itl_ms, point.tokens_per_s
        )
        for point in points
    ]


def fitted(loads: list[MeasuredLoad]) -> CalibrationFit:
    about = {
        "device": "h100-sxm-80g",
        "runtime": "tensorrt",
        "recipe": "llama",
        "made": "2026-11-23",
        "measured": ["b"],
    }
    return fit_calibration(
        recipe_model(recipe(), spec(), None), loads, about=about, source=model_name(recipe())
    )


@pytest.fixture(scope="module")
def fit() -> CalibrationFit:
    return fitted(measured())


def test_loads_that_were_left_out_are_met_where_published_constants_were_off(fit: CalibrationFit) -> None:
    for figure, found in fit.calibration.errors.items():
        assert found.before is not None
        assert found.left_out is not None
        assert found.before > 0.1, figure
        assert found.left_out < found.before / 3, figure


def test_loads_and_lengths_that_nobody_measured_are_met(fit: CalibrationFit) -> None:
    model = recipe_model(recipe(), spec(), fit.calibration)
    for truth in measured((8, 24), Workload(700, 300)):
        point = model.service(None).at(truth.concurrency, truth.work)
        assert point.itl_ms == pytest.approx(truth.itl_ms, rel=0.05)
        assert point.tokens_per_s == pytest.approx(truth.tokens_per_s, rel=0.05)


def test_what_was_left_out_was_not_learned_from() -> None:
    """An odd load moves its own forecast from the others by nothing."""
    loads = measured((1, 32))
    odd = [loads[0], replace(loads[1], itl_ms=3 * loads[1].itl_ms, tokens_per_s=loads[1].tokens_per_s / 3)]
    plain, changed = (
        {row.figure: row.left_out for row in fitted(ones).rows if row.load.concurrency == 32}
        for ones in (loads, odd)
    )
    assert plain == pytest.approx(changed)


def test_repeats_of_a_load_are_left_out_together() -> None:
    found = fitted([*measured((8,)), *measured((8,))])
    assert all(error.left_out is None for error in found.calibration.errors.values())


def test_what_one_load_says_nothing_of_stays_and_is_named() -> None:
    found, before = fitted(measured((1,))).calibration, recipe_model(recipe(), spec(), None).constants
    assert {"attention", "cache", "arithmetic"} <= set(found.undetermined)
    assert found.constants.attention == pytest.approx(before.attention, rel=0.1)
    assert found.errors["itl"].left_out is None


def test_an_interval_holds_all_loads_that_were_left_out(fit: CalibrationFit) -> None:
    for row in fit.rows:
        assert row.left_out is not None
        estimate = fit.calibration.estimate(row.figure, row.left_out, ())
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low * 0.998 <= row.measured <= estimate.high * 1.002
        assert fit.calibration.estimate(row.figure, row.left_out, ("drafts",)).low is None


def test_a_forecast_names_what_the_calibration_has_not_measured(fit: CalibrationFit) -> None:
    def unchecked(changed: Recipe, prompt_tokens: int) -> tuple[str, ...]:
        found = forecast_recipe(
            changed, spec(), prompt_tokens=prompt_tokens, output_tokens=200, calibration=fit.calibration
        )
        assert found is not None
        assert (found.tokens_per_s is not None and found.tokens_per_s.low is None) == bool(found.unchecked)
        assert fit.calibration.source in found.source
        return found.unchecked

    assert unchecked(recipe(), 1000) == ()
    assert unchecked(recipe(), 4000) == ("prompts of 4000 tokens",)
    other = recipe().model.model_copy(update={"source": load_recipe("tiny-cpu", ()).model.source})
    assert unchecked(recipe().model_copy(update={"model": other}), 1000) == (
        "the model local:support-target",
    )


def test_a_file_gives_back_what_was_written(fit: CalibrationFit, tmp_path: Path) -> None:
    file = tmp_path / "deep" / calibration_file("h100-sxm-80g", "tensorrt")
    fit.calibration.write(file)
    assert SpeedCalibration.read(file) == fit.calibration
    assert [file.name for file in file.parent.iterdir()] == [file.name]


def test_a_file_with_faults_names_them_all(fit: CalibrationFit, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    fit.calibration.write(file)
    text = (
        file.read_text().replace("  memory: ", "  memory: -").replace("runtime: tensorrt", "runtime: abacus")
    )
    file.write_text(text)
    with pytest.raises(InvalidInput) as raised:
        SpeedCalibration.read(file)
    assert {fault.key for fault in raised.value.faults} == {"constants.memory", "runtime"}
    file.write_text("a: [")
    with pytest.raises(InvalidInput, match="is not YAML"):
        SpeedCalibration.read(file)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_the_acceptance_of_tokens_is_found_from_the_share_that_was_accepted(acceptance: float) -> None:
    share = (tokens_per_round(acceptance, 5) - 1) / 5
    assert token_acceptance(share, 5) == pytest.approx(acceptance, abs=1e-6)
