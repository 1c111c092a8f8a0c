"""The soak benchmark: it holds what it says, and a minute of it for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mixed_load import Mix
from benchmarks.soak import Process, Soak, broken
from pipeline.triton.deployment import DeploymentLimits

ROOT = Path(__file__).resolve().parents[2]
LIMITS = DeploymentLimits(max_input_tokens=512, max_output_tokens=256, max_concurrency=16)
MINUTES = 60


def soaked(*, mib: float = 0.0, late: float = 1.0, faults: tuple[str, ...] = ()) -> Soak:
    """An hour of one request a second, whose gateway grows by so many MiB in it, and whose last TTFTs are `late`."""
    soak = Soak("", Mix("tiny-cpu", LIMITS, guided=False), 1, 0.0, 60.0 * MINUTES)
    soak.requests, soak.faults = 3600, list(faults)
    soak.first_ms = [(at, 10.0 * (late if at >= 3000 else 1.0)) for at in map(float, range(3600))]
    soak.processes = {7: Process("gateway", 7, [(at, at, 50 + mib * at / 3600) for at in range(3600)])}
    return soak


def test_each_bound_is_held() -> None:
    assert list(broken(soaked(mib=0.7, late=1.19), {"triton": 0}, 2.0, 1.2)) == []
    (grown,) = broken(soaked(mib=0.8), {}, 2.0, 1.2)
    assert grown == "gateway grows by 2.22 MiB per 10,000 requests; 2 are allowed"
    (late,) = broken(soaked(late=1.3), {}, 2.0, 1.2)
    assert "1.30 times" in late
    (failed,) = broken(soaked(faults=("a fault",)), {}, 2.0, 1.2)
    assert failed.startswith("1 of 3600 requests")
    assert list(broken(soaked(), {"gateway": 1}, 2.0, 1.2)) == ["restarted: {'gateway': 1}"]


def test_the_mix_has_every_kind_and_is_the_same_in_every_run() -> None:
    first, second = (Mix("tiny-cpu", LIMITS, guided=True) for _ in range(2))
    asked = [first.next() for _ in range(600)]
    assert asked == [second.next() for _ in range(600)]
    assert {request.path for request in asked} == {"/v1/chat/completions", "/v1/completions"}
    assert {request.tenant for request in asked} == {"shop", "desk", "lab"}
    assert {request.body["stream"] for request in asked} == {True, False}
    for kind in ("response_format", "stop", "seed", "min_tokens"):
        assert any(kind in request.body for request in asked), kind
    assert all(request.body["stream"] for request in asked if request.leaves or request.reads_slowly)
    assert any(request.leaves for request in asked)
    assert any(request.reads_slowly for request in asked)
    assert len({json.dumps(request.body["messages"]) for request in asked if request.repeats is not None}) > 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_with_an_exchange_in_the_middle_has_no_fault(store: Path) -> None:
    """How fast it is, and how much a process that has just begun grows, is not judged."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "soak.py"),
        "--minutes",
        "1",
        "--warm-up-s",
        "5",
        "--json",
    ]
    done = subprocess.run(
        [*command, "--exchange", "--allow-mib", "1e9", "--allow-ttft", "1e9"],
        capture_output=True, text=True, timeout=800, check=False,
        env={**os.environ, "PIPELINE_STORE": str(store), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["faults"] == result["broken"] == []
    assert [exchange["exit_code"] for exchange in result["exchanges"]] == [0]
    assert result["requests"] > 50
    assert result["x_cache"]["exact"] > 0
    names = [process["name"] for process in result["processes"]]
    assert {"serve", "gateway", "tritonserver", "tensorrt_llm", "tensorrt_llm_bls"} <= set(names)
    assert names.count("tritonserver") == 2
