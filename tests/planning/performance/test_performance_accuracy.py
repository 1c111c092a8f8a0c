"""The model against published figures, and what it says of its own error."""

from __future__ import annotations

from datetime import date

import pytest

from pipeline.contracts.models import known_model
from pipeline.planning.memory import Demand, ModelNeed
from pipeline.planning.performance import Workload, forecast
from pipeline.planning.performance.accuracy import COVERAGE, compared, error_summary, summary
from pipeline.planning.performance.efficiency import fitted
from pipeline.planning.performance.engine import Engine
from pipeline.planning.performance.published import Figure, Use, figures, fills_steps, source
from pipeline.recipe import Slo

CONCERNED = frozenset(figure for figure in figures("held-out") if fills_steps(figure))
USES: tuple[Use, ...] = ("calibrate", "held-out")


def test_the_stored_errors_are_those_that_the_constants_have() -> None:
    """They change with the memory model, too, which says how many requests run at a time: then fit anew."""
    for use in USES:
        for kind, figures_of_it in error_summary(use).items():
            assert fitted()["errors"][use][kind] == pytest.approx(figures_of_it, abs=0.02)
    assert date.fromisoformat(fitted()["fitted"]["on"])


def test_held_out_figures_are_met() -> None:
    held = error_summary("held-out")
    assert held["full-load"]["median"] < 0.10
    assert held["fixed-batch"]["median"] < 0.10
    assert held["first-token"]["median"] < 0.05


def test_no_more_sequences_decode_than_a_step_keeps_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory holds more of them than prompts leave room for, figures held aside are met, and were not."""
    now = error_summary("held-out")["full-steps"]
    monkeypatch.setattr(Engine, "most_decoding", lambda *_: 10**9)
    concerned = [one for one in compared("held-out") if one.figure in CONCERNED]
    before = summary(concerned)
    assert now["count"] == before["count"] == 20
    assert now["median"] < 0.15
    assert before["median"] > 0.19


@pytest.mark.parametrize(
    ("quantity", "kinds"), [("throughput", ("full-load", "fixed-batch")), ("first-token",) * 2]
)
def test_intervals_cover_as_many_as_they_say(quantity: str, kinds: tuple[str, ...]) -> None:
    ends = error_summary("held-out")[quantity]
    ones = [one for one in compared("held-out") if one.figure.kind in kinds]
    inside = [one for one in ones if ends["low"] <= one.figure.measured / one.computed <= ends["high"]]
    assert len(inside) / len(ones) >= COVERAGE - 2 / len(ones)


def test_nothing_is_both_fitted_to_and_held_out() -> None:
    def what(figure: Figure) -> tuple[object, ...]:
        split = (figure.split.tensor, figure.split.pipeline)
        lengths = (figure.prompt_tokens, figure.output_tokens, figure.batch)
        return (figure.source, figure.kind, figure.model, figure.gpu, split, lengths)

    fitted_to, held = ({what(one) for one in figures(use)} for use in USES)
    assert not fitted_to & held
    assert len(fitted_to) + len(held) == len(figures())
    assert all(source(figure) for figure in figures())
    # Models, GPUs and splits that no constant has seen.
    assert {one.model for one in figures("held-out")} > {one.model for one in figures("calibrate")} - {
        "mixtral-8x7b"
    }
    assert {"gb200-186g", "mistral-7b", "llama-3.1-405b"} <= {
        name for one in figures("held-out") for name in (one.gpu, one.model)
    } - {name for one in figures("calibrate") for name in (one.gpu, one.model)}


def test_a_forecast_brackets_what_it_computes() -> None:
    sizes = known_model("meta-llama/Llama-3.1-8B-Instruct")
    assert sizes is not None
    demand = Demand(
        "h100-sxm-80g", 80 * 2**30, (ModelNeed("target", sizes, format="fp8"),), 4096, concurrency=32
    )
    seen = forecast(demand, "tensorrt", Workload(2048, 512), Slo(ttft_p95_ms=400, itl_p95_ms=40))
    assert seen is not None
    for estimate in (seen.ttft_ms, seen.itl_ms, seen.tokens_per_s):
        assert estimate is not None
        assert estimate.low < estimate.value < estimate.high
    assert seen.curve[0].batch == 1
    assert seen.curve[-1].batch == seen.concurrency == 32
    assert seen.meets_slo is True
    assert seen.gains == ()
    assert all(len(line) <= 60 for line in seen.lines(60))


def test_what_does_not_fit_has_no_forecast() -> None:
    sizes = known_model("meta-llama/Llama-3.3-70B-Instruct")
    assert sizes is not None
    demand = Demand("l4-24g", 24 * 2**30, (ModelNeed("target", sizes),), 4096, concurrency=1)
    assert forecast(demand, "pytorch", Workload(1000, 100), Slo()) is None
