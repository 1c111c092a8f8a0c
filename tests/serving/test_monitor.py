"""When a server counts as hung: what is read from Triton's page, and what is decided from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.serving.live import MetricsPage
from pipeline.serving.monitor import (
    HealthVerdict,
    ProgressJudge,
    default_hang_timeout_s,
    has_room,
    probed_paths,
)
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment

ENTRY = ("tensorrt_llm_bls", "tensorrt_llm")
TIMEOUT_S, STEP_S = 3.0, 0.4


def page(steps: float = 7, *, active: int = 4, scheduled: int = 4, context: int = 0) -> MetricsPage:
    """What a server with four places shows."""
    waiting = active - scheduled
    counts = {"active": active, "scheduled": scheduled, "context": context, "waiting": waiting, "max": 4}
    engine = {"model": "tensorrt_llm", "version": "1"}
    general = {"iteration_counter": steps, "timestamp": 1795385714126474.0 + steps}
    return MetricsPage(
        0.0,
        {
            "nv_inference_request_success_total": [({"model": "tensorrt_llm_bls", "version": "1"}, 3.0)],
            "nv_trt_llm_general_metrics": [
                ({**engine, "general_type": name}, value) for name, value in general.items()
            ],
            "nv_trt_llm_request_metrics": [
                ({**engine, "request_type": name}, float(value)) for name, value in counts.items()
            ],
        },
    )


def verdicts(pages: list[MetricsPage | None], cpu_s: list[float] | None = None) -> Iterator[HealthVerdict]:
    """Of a probe that waits while these pages are read, one after the other."""
    judge = ProgressJudge(ENTRY, TIMEOUT_S)
    for number, seen in enumerate(pages):
        now = number * STEP_S
        yield judge.judge(now, now, seen, None if cpu_s is None else cpu_s[number])


def kinds(pages: list[MetricsPage | None], cpu_s: list[float] | None = None) -> list[str]:
    return [verdict.kind for verdict in verdicts(pages, cpu_s)]


@settings(max_examples=10)
@given(st.lists(st.integers(1, 2), min_size=50, max_size=100))
def test_busy_is_not_ill(gaps: list[int]) -> None:
    """All places are taken for a minute and more, and steps are made, if not between any two pages."""
    seen = [page(steps, active=9) for steps, gap in enumerate(gaps) for _ in range(gap)]
    assert set(kinds(seen)) == {"wait"}


@given(st.integers(0, 20), st.sampled_from([None, page(99, active=9)]))
def test_no_progress_is_found_in_time(before: int, after: MetricsPage | None) -> None:
    """Whether Triton still shows its page or not."""
    found = kinds([page(step, active=9) for step in range(before)] + [after] * 20)
    assert "hung" not in found[:before]
    # Counted from the last progress; there is none before the first page.
    assert found.index("hung") * STEP_S <= max(TIMEOUT_S, (before + 1) * STEP_S + TIMEOUT_S / 2) + STEP_S


def test_an_engine_that_computes_in_a_long_step_is_not_hung_for_a_minute() -> None:
    still = [page(active=9)] * 400
    computing = kinds(still, [number * STEP_S * 0.5 for number in range(400)])
    assert set(computing[: int(55 / STEP_S)]) == {"wait"}
    assert "hung" in computing
    # An idle server uses some, too.
    assert "hung" in kinds(still, [number * STEP_S * 0.02 for number in range(400)])[:20]


def test_an_answer_that_was_lost_is_asked_for_again_before_the_server_is_judged() -> None:
    """Others go on, and the engine has room: the probe does not wait there."""
    found = kinds([page(number, active=2, scheduled=2) for number in range(40)])
    assert found.count("ask again") == 1
    again, hung = found.index("ask again"), found.index("hung")
    assert again * STEP_S >= TIMEOUT_S
    assert hung * STEP_S >= 2 * TIMEOUT_S


def test_what_was_seen_before_the_watcher_was_held_up_does_not_count() -> None:
    judge = ProgressJudge(ENTRY, TIMEOUT_S)
    assert judge.judge(0.5, 0.5, page(), None).kind == "wait"
    assert judge.judge(600, 600, page(), None).kind == "wait"
    assert judge.judge(600.4, 600.4, page(), None).kind == "wait"


@pytest.mark.parametrize(
    ("counts", "room"),
    [
        ({"active": 3, "scheduled": 3}, True),
        ({"active": 4, "scheduled": 4}, False),
        ({"active": 3, "scheduled": 2}, False),
        ({"active": 3, "scheduled": 3, "context": 1}, False),
    ],
)
def test_room(counts: dict[str, int], room: bool) -> None:
    assert has_room(page(**counts), "tensorrt_llm") is room
    assert has_room(page(**counts), "preprocessing") is None


def test_which_models_are_asked() -> None:
    deployment = gpu_deployment(LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=1))

    def paths(*models: str, entry: str, runtime: str = "tensorrt") -> dict[str, tuple[str, ...]]:
        changed = deployment.model_copy(update={"models": models, "entry_model": entry, "runtime": runtime})
        return probed_paths(changed)

    five = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
    steps = ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing")
    assert paths(*five, entry="tensorrt_llm_bls") == {"tensorrt_llm_bls": ENTRY, "ensemble": steps}
    assert paths(*five, "tensorrt_llm_draft", entry="tensorrt_llm_bls") == {
        "tensorrt_llm_bls": (*ENTRY, "tensorrt_llm_draft"),
        "ensemble": steps,
        "tensorrt_llm_draft": ("tensorrt_llm_draft",),
    }
    assert paths("tensorrt_llm", entry="tensorrt_llm", runtime="pytorch") == {
        "tensorrt_llm": ("tensorrt_llm",)
    }


def test_longer_prompts_have_more_time() -> None:
    deployment = gpu_deployment(LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=1))

    def timeout_s(tokens: int, runtime: str = "tensorrt") -> float:
        limits = deployment.limits.model_copy(update={"max_input_tokens": tokens})
        changed: Deployment = deployment.model_copy(update={"limits": limits, "runtime": runtime})
        return default_hang_timeout_s(changed)

    assert timeout_s(1024) == timeout_s(16_384) == 3
    assert timeout_s(131_072) == 24
    assert timeout_s(1024, "pytorch") == 10
