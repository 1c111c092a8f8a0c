"""Figures held against the plan: what passes, what fails, and what is only told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bench.accept.judging import held_to_forecast, memory_checks, slo_checks
from pipeline.machine import gpus
from pipeline.machine.probe import CommandOutput
from pipeline.plan.memory import MemoryPlan
from pipeline.plan.performance.estimates import Estimate
from pipeline.prepare.report import make_report
from pipeline.recipe import Slo, load_recipe
from pipeline.serving.served import gpu_memory_mib
from pipeline.store import Store
from tests.support.machines import line, put_nvidia_smi

positive = st.floats(min_value=1e-3, max_value=1e6)


@given(value=positive, forecast=positive, below=st.floats(0, 0.9), above=st.floats(0, 3), less=st.booleans())
def test_only_what_is_worse_than_the_bracket_fails(
    value: float, forecast: float, below: float, above: float, less: bool
) -> None:
    estimate = Estimate(forecast, forecast * (1 - below), forecast * (1 + above))
    check = held_to_forecast("a figure", value, estimate, "ms", less_is_better=less)
    assert estimate.low is not None
    assert estimate.high is not None
    worse = value > estimate.high if less else value < estimate.low
    assert check.outcome == ("failed" if worse else "passed")
    assert check.in_bracket == (estimate.low <= value <= estimate.high)
    assert bool(check.note) == (not worse and not check.in_bracket)
    assert check.deviation_percent == pytest.approx(100 * (value - forecast) / forecast, rel=1e-9, abs=1e-6)


def test_without_a_bracket_or_a_forecast_a_figure_is_told_and_not_judged() -> None:
    alone = held_to_forecast("a figure", 12.0, Estimate(10.0), "ms")
    assert (alone.outcome, alone.in_bracket) == ("measured", None)
    assert alone.deviation_percent == pytest.approx(20)
    unknown = held_to_forecast("a figure", 12.0, None, "ms")
    assert (unknown.outcome, unknown.expected, unknown.deviation_percent) == ("measured", "", None)


def test_the_slo_is_held_where_there_is_one() -> None:
    assert list(slo_checks(Slo(), 10, 10, 4)) == []
    checks = list(slo_checks(Slo(ttft_p95_ms=5, itl_p95_ms=20), 10, 10, 4))
    assert [(check.name, check.outcome) for check in checks] == [
        ("slo.ttft_p95_ms, 4 streams", "failed"),
        ("slo.itl_p95_ms, 4 streams", "passed"),
    ]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> MemoryPlan:
    """Of a model whose sizes are known, on one H100."""
    store = Store(tmp_path_factory.mktemp("store"))
    memory = make_report(load_recipe("llama-3.1-8b-fp8"), store, offline=True).memory
    assert memory is not None
    return memory


def test_a_gpu_that_holds_what_is_planned_passes_and_one_that_holds_more_fails(planned: MemoryPlan) -> None:
    used = planned.ranks[0].used / 2**20
    for factor, blocks, outcomes in (
        (1.0, 1.0, ["passed", "passed"]),
        (0.5, 2.0, ["passed", "passed"]),
        (1.2, 0.8, ["failed", "failed"]),
    ):
        found = memory_checks(
            planned, {"GPU 0": factor * used}, {"tensorrt_llm": blocks * planned.blocks}, on_gpu=True
        )
        assert [check.outcome for check in found] == outcomes


def test_memory_of_a_cpu_is_told_beside_the_plan(planned: MemoryPlan) -> None:
    """No published measurement is of one, so that there is no bracket."""
    memory, blocks = memory_checks(planned, {"tensorrt_llm": 190.0}, {"tensorrt_llm": 5.0}, on_gpu=False)
    assert (memory.outcome, blocks.outcome) == ("measured", "measured")
    assert memory.forecast is not None
    without = list(memory_checks(None, {"GPU 0": 1.0}, {}, on_gpu=True))
    assert [check.outcome for check in without] == ["measured", "skipped"]


def test_an_unplanned_gpu_is_not_judged(planned: MemoryPlan) -> None:
    first, second, *_ = memory_checks(
        replace(planned), {"GPU 0": 1.0, "GPU 1": 1.0}, {"tensorrt_llm": 1.0}, on_gpu=True
    )
    assert (first.outcome, second.outcome) == ("passed", "measured")


def test_memory_of_gpus_is_that_of_those_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nvidia-smi tells it, before the start and after."""
    monkeypatch.setattr(gpus, "ask_nvml", lambda _: CommandOutput(problem="nvidia-ml-py is not installed"))
    put_nvidia_smi(tmp_path, monkeypatch, f"{line(0, free=81000)}\n{line(1, free=21559)}")
    assert gpu_memory_mib((), {}) == {"GPU 0": 559.0, "GPU 1": 60000.0}
    assert gpu_memory_mib((1,), {}) == {"GPU 1": 60000.0}
    assert gpu_memory_mib((), {"CUDA_VISIBLE_DEVICES": "0"}) == {"GPU 0": 559.0}
    put_nvidia_smi(tmp_path, monkeypatch, "", code=9)
    assert gpu_memory_mib((), {}) == {}
