"""The model against published figures, and what it says of its own error."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from pipeline.cli.render.speed import forecast_lines
from pipeline.contracts.models import known_model
from pipeline.contracts.releases import Track
from pipeline.models.blocks import LatentAttention
from pipeline.plan.memory import DeploymentSpec, ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance import Workload, forecast
from pipeline.plan.performance.accuracy import (
    COVERAGE,
    FigureError,
    PublishedFigure,
    Use,
    checked_range,
    compute_figure,
    error_summary,
    figure_errors,
    figure_source,
    figures,
    fills_steps,
    summarize,
    unchecked,
)
from pipeline.plan.performance.engine import EngineSpeed
from pipeline.plan.performance.roofline import fitted_constants
from pipeline.recipe import Slo

USES: tuple[Use, ...] = ("calibrate", "held-out")


def test_the_stored_errors_are_those_that_the_constants_have() -> None:
    """They change with the memory model, too, which says how many requests run at a time: then fit anew."""
    for use in USES:
        for kind, figures_of_it in error_summary(use).items():
            assert fitted_constants()["errors"][use][kind] == pytest.approx(figures_of_it, abs=0.02)
    assert date.fromisoformat(fitted_constants()["fitted"]["on"])


def test_held_out_figures_are_met() -> None:
    held = error_summary("held-out")
    assert held["full-load"]["median"] < 0.10
    assert held["fixed-batch"]["median"] < 0.10
    assert held["first-token"]["median"] < 0.05


def test_no_more_sequences_decode_than_a_step_keeps_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory holds more of them than prompts leave room for, figures held aside are met, and were not."""
    concerned = [figure for figure in figures("held-out") if fills_steps(figure)]
    now = error_summary("held-out")["full-steps"]
    monkeypatch.setattr(EngineSpeed, "most_decoding", lambda *_: 10**9)
    before = summarize([FigureError(figure, compute_figure(figure)) for figure in concerned])
    assert now["count"] == before["count"] == 20
    assert now["median"] < 0.15
    assert before["median"] > 0.19


@pytest.mark.parametrize(
    ("quantity", "kinds"), [("throughput", ("full-load", "fixed-batch")), ("first-token",) * 2]
)
def test_intervals_cover_as_many_as_they_say(quantity: str, kinds: tuple[str, ...]) -> None:
    ends = error_summary("held-out")[quantity]
    ones = [one for one in figure_errors("held-out") if one.figure.kind in kinds]
    inside = [one for one in ones if ends["low"] <= one.figure.measured / one.computed <= ends["high"]]
    assert len(inside) / len(ones) >= COVERAGE - 2 / len(ones)


def test_nothing_is_both_fitted_to_and_held_out() -> None:
    def what(figure: PublishedFigure) -> tuple[object, ...]:
        split = (figure.split.tensor, figure.split.pipeline)
        lengths = (figure.prompt_tokens, figure.output_tokens, figure.batch)
        return (figure.source, figure.kind, figure.model, figure.gpu, split, lengths)

    fitted_to, held = ({what(one) for one in figures(use)} for use in USES)
    assert not fitted_to & held
    assert len(fitted_to) + len(held) == len(figures())
    assert all(figure_source(figure) for figure in figures())
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
    demand = DeploymentSpec(
        "h100-sxm-80g", 80 * 2**30, (ModelSpec("target", sizes, format="fp8"),), 4096, concurrency=32
    )
    seen = forecast(demand, "tensorrt", Workload(2048, 512), Slo(ttft_p95_ms=400, itl_p95_ms=40))
    assert seen is not None
    for estimate in (seen.ttft_ms, seen.tokens_per_s):
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low < estimate.value < estimate.high
    assert seen.itl_ms.low is None  # no published figure is of one request
    assert seen.unchecked == seen.unchecked_first == ()
    assert seen.curve[0].batch == 1
    assert seen.curve[-1].batch == seen.concurrency == 32
    assert seen.meets_slo is True
    assert seen.gains == ()
    assert all(len(line) <= 60 for line in forecast_lines(seen, 60))


def test_what_does_not_fit_has_no_forecast() -> None:
    sizes = known_model("meta-llama/Llama-3.3-70B-Instruct")
    assert sizes is not None
    demand = DeploymentSpec("l4-24g", 24 * 2**30, (ModelSpec("target", sizes),), 4096, concurrency=1)
    assert forecast(demand, "pytorch", Workload(1000, 100), Slo()) is None


WINDOWED = known_model("openai/gpt-oss-120b")
assert WINDOWED is not None
LATENT = LatentAttention(kv_rank=512, rope=64, nope=128, value=128, query_rank=1536)


@pytest.mark.parametrize(
    ("doubt", "device", "track", "changes", "batch"),
    [
        ("weights in int4_awq", "h100-sxm-80g", "tensorrt", {"format": "int4_awq"}, 64),
        ("weights in w4a8_awq", "h100-sxm-80g", "tensorrt", {"format": "w4a8_awq"}, 64),
        ("weights in int8_sq", "h100-sxm-80g", "tensorrt", {"format": "int8_sq"}, 64),
        ("multi-head latent attention", "h100-sxm-80g", "pytorch", {"latent": LATENT}, 64),
        ("experts of LlamaForCausalLM in fp8 on 1 GPU", "h100-sxm-80g", "pytorch", {"experts": 8}, 64),
        ("layers that see a window", "h100-sxm-80g", "pytorch", {"blocks": WINDOWED.blocks}, 64),
        ("8 pipeline stages", "h100-sxm-80g", "pytorch", {"split": Parallelism(pipeline=8)}, 64),
        ("16 GPUs", "h100-sxm-80g", "pytorch", {"split": Parallelism(tensor=16)}, 64),
        ("fewer than 7 requests at a time", "h100-sxm-80g", "pytorch", {}, 6),
        ("drafts", "h100-sxm-80g", "tensorrt", {"drafts": True}, 64),
    ],
)
def test_what_no_published_figure_is_of_has_no_bracket(
    doubt: str, device: str, track: Track, changes: dict[str, Any], batch: int
) -> None:
    """Changed by one thing from a deployment that they speak for."""
    sizes = known_model("meta-llama/Llama-3.1-8B-Instruct")
    assert sizes is not None
    of_need = {name: changes[name] for name in ("format", "split") if name in changes}
    of_sizes = {name: changes[name] for name in ("latent", "experts", "blocks") if name in changes}
    plain = ModelSpec("target", sizes, format="fp8")
    need = replace(plain, sizes=replace(sizes, **of_sizes), **of_need)
    drafts = "drafts" in changes
    assert unchecked("throughput", plain, device, track, batch=64) == ()
    assert doubt in unchecked("throughput", need, device, track, batch=batch, drafts=drafts)


def test_first_tokens_were_published_of_engines_on_older_gpus_only() -> None:
    sizes = known_model("meta-llama/Llama-3.1-8B-Instruct")
    assert sizes is not None
    plain = ModelSpec("target", sizes, format="fp8")
    assert unchecked("first-token", plain, "h100-sxm-80g", "tensorrt") == ()
    assert unchecked("first-token", plain, "h100-sxm-80g", "pytorch") == ("runtime.kind pytorch",)
    (doubt,) = unchecked("first-token", plain, "b200-sxm-180g", "tensorrt")
    assert doubt == "the generation of b200-sxm-180g"


def test_what_the_figures_are_of_is_stored_beside_the_constants() -> None:
    for quantity in ("throughput", "first-token"):
        assert fitted_constants()["reach"][quantity] == checked_range(quantity)


def test_the_sentence_about_accuracy_is_about_what_was_compared() -> None:
    sizes = known_model("meta-llama/Llama-3.1-8B-Instruct")
    assert sizes is not None
    demand = DeploymentSpec(
        "h100-sxm-80g", 81559 * 2**20, (ModelSpec("target", sizes, format="w4a8_awq"),), 1100, 32
    )
    seen = forecast(demand, "tensorrt", Workload(1000, 100), Slo(ttft_p95_ms=1000))
    assert seen is not None
    assert seen.tokens_per_s is not None
    assert seen.tokens_per_s.low is seen.tokens_per_s.high is seen.ttft_ms.low is None
    text = " ".join(" ".join(forecast_lines(seen, 100)).split())
    assert "held aside" not in text
    assert "bracket" not in text
    assert text.count("weights in w4a8_awq") == 2
    assert (
        "first tokens under load (p95), and what of the SLO depends on them, come from a queueing formula"
        in text
    )
    row = seen.as_json()["tokens_per_s"]
    assert row == {"value": row["value"], "low": None, "high": None}  # type: ignore[index,call-overload]
    assert len(seen.as_json()["warnings"]) == 4  # type: ignore[arg-type]
