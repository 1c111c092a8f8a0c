"""`pipeline bench` on a whole deployment: both ways, and its counts held against the server's own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.serving.live import MetricsPage
from pipeline.serving.served import ServedDeployment
from pipeline.store import Store
from pipeline.triton.running import RunningServer
from tests.e2e.conftest import Build, pipeline

REQUESTS, PROMPT, OUTPUT = 40, 60, 20
LOAD = (
    *(
        "--load",
        f"requests={REQUESTS}",
        "--load",
        "warmup_s=0",
        "--load",
        "concurrency=4",
        "--load",
        "seed=5",
    ),
    *("--load", f"prompt_tokens={PROMPT}", "--load", f"output_tokens={OUTPUT}"),
    *("--slo", "ttft_p95_ms=600000", "--slo", "itl_p95_ms=600000"),
)


@pytest.fixture(params=("triton", "gateway"), scope="module")
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(
    way: str, build: Build, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    build("tiny-cpu")
    words = ["tiny-cpu", "--store", str(store), "--set", "triton.health_interval_s=3600"]
    words += ["--no-gateway"] if way == "triton" else []
    logs = tmp_path_factory.mktemp("logs")
    served = ServedDeployment.start(words, "tiny-cpu", Store.at(store).running, logs, deadline_s=240)
    try:
        yield served.record
    finally:
        served.stop()


def bench(store: Path, *arguments: str) -> dict[str, Any]:
    done = pipeline("bench", "tiny-cpu", *arguments, "--json", store=store)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@dataclass(frozen=True)
class Counts:
    """What the server that is asked has counted. Its checks of itself ask the engine, for one token each."""

    requests: float
    prompt_tokens: float
    output_tokens: float
    checks: float = 0.0

    @classmethod
    def of(cls, record: RunningServer) -> Counts:
        page = MetricsPage.fetch(
            f"{record.gateway_url}/metrics" if record.gateway_url else record.metrics_url
        )
        assert page is not None
        if record.gateway_url:
            requests = page.total("pipeline_requests_total", endpoint="/v1/chat/completions") or 0.0
            tokens = [page.total(f"pipeline_{text}_tokens_total") or 0.0 for text in ("prompt", "generation")]
            return cls(requests, *tokens)
        made = page.by("nv_trt_llm_general_metrics", "general_type", model="tensorrt_llm")
        done = page.by("nv_inference_request_success_total", "model")
        requests = done.get("tensorrt_llm_bls", 0.0)
        return cls(requests, made["prompt_tokens"], made["generated_tokens"], done["tensorrt_llm"] - requests)

    @classmethod
    def settled(cls, record: RunningServer) -> Counts:
        """The counts when nothing is under way: the engine's gauges follow it at a distance of 0.1 s."""
        before, now = None, cls.of(record)
        while now != before:
            time.sleep(3)
            before, now = now, cls.of(record)
        return now


@pytest.mark.servers
def test_counts_are_those_of_the_server(way: str, served: RunningServer, store: Path, tmp_path: Path) -> None:
    before = Counts.settled(served)
    page = tmp_path / "bench.html"
    result = bench(store, *LOAD, "--output", str(page))
    assert result["target"]["way"] == way
    after, level = Counts.settled(served), result["levels"][0]
    checks = after.checks - before.checks
    assert level["requests"] == {"complete": REQUESTS} | dict.fromkeys(
        ("left", "refused", "failed", "abandoned"), 0
    )
    # An OpenAI server is asked for one token before the load, so that one that refuses is noticed.
    first = int(way == "gateway")
    assert after.requests - before.requests == REQUESTS + first
    assert level["output_tokens_mean"] == OUTPUT
    assert after.output_tokens - before.output_tokens == OUTPUT * REQUESTS + first + checks
    asked = level["input_tokens_mean"] * REQUESTS
    greeted = first * (asked / REQUESTS)
    assert asked <= after.prompt_tokens - before.prompt_tokens + 0.1 <= asked + greeted + 4 * checks + 0.2
    # The question, and what the chat template puts around it.
    assert PROMPT < asked / REQUESTS < PROMPT + 20
    assert level["output_tokens_per_s"] * level["seconds"] == pytest.approx(OUTPUT * REQUESTS, rel=0.01)
    found = level["latencies"]
    assert found["ttft"]["count"] == found["total"]["count"] == REQUESTS
    for latency in found.values():
        assert 0 <= latency["p50"] <= latency["p90"] <= latency["p95"] <= latency["p99"] <= latency["max"]
    assert found["ttft"]["p50"] < found["total"]["p50"]
    assert [check["met"] for check in level["slo"]] == [True, True]
    assert level["goodput_per_s"] == pytest.approx(level["requests_per_s"])
    assert "<svg" in page.read_text(encoding="utf-8")
    if way == "triton":
        # By the server's clock; both lie within what the client waited for.
        assert found["queue"]["p50"] + found["prefill"]["p50"] <= found["ttft"]["max"]
    else:
        assert level["server"]["queue_mean_ms"] is not None


@pytest.mark.servers
def test_conversations_with_a_shared_prefix_find_their_blocks_again(
    served: RunningServer, store: Path
) -> None:
    def reused() -> float:
        page = MetricsPage.fetch(served.metrics_url)
        assert page is not None
        return page.by("nv_trt_llm_general_metrics", "general_type")["prompt_tokens_reused"]

    before = reused()
    result = bench(
        store, "--load", "requests=30", "--load", "warmup_s=0", "--load", "concurrency=2", 
        "--load", "prefix_tokens=128", "--load", "turns=3",
        "--load", "prompt_tokens=20", "--load", "output_tokens=10", "--load", "cancel=0.2",
    )  # fmt: skip
    outcomes = result["levels"][0]["requests"]
    assert outcomes["complete"] + outcomes["left"] == sum(outcomes.values()) == 30
    # All but the first found the prefix; whole blocks are shared.
    assert reused() - before >= 20 * 64
