"""`pipeline accept`: the whole run on the `cpu` runtime, with what is wrong on purpose; and for real on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.bench.accept.report import AcceptanceReport
from pipeline.bench.accept.run import STEPS, accept
from pipeline.bench.accept.settings import AcceptSettings
from pipeline.cli.accept import command
from pipeline.errors import InvalidInput
from pipeline.machine.processes import processes_below
from pipeline.process_state import ProcessStat
from pipeline.progress import Silent
from pipeline.recipe import load_recipe
from pipeline.store import Store
from pipeline.triton.running import RunningServer
from tests.e2e.conftest import pipeline
from tests.support.waiting import wait_for

SMALL = (
    "--load",
    "prompt_tokens=24",
    "--load",
    "output_tokens=8",
    "--load",
    "rounds=2",
    "--load",
    "questions=8",
)
# Two engines, so that a request can do without the draft.
RECIPE = ("tiny-cpu", "--set", "runtime.speculation=bls", "--set", "limits.max_concurrency=4")
# What upstream's file does, as far as its command line and its exit code show it.
UPSTREAM = f"""#!{sys.executable}
import argparse, json, sys
from pipeline.bench.accept.upstream import end_to_end
given = argparse.ArgumentParser()
for name in ("url", "model-name", "prompt", "output-len", "expected-outputs"):
    given.add_argument("--" + name)
for name in ("exclude-input-in-output", "check-outputs", "streaming"):
    given.add_argument("--" + name, action="store_true")
flags = given.parse_args()
asked = {{"max_tokens": int(flags.output_len), "streaming": flags.streaming}}
read = end_to_end(flags.url, flags.model_name, [flags.prompt], **asked)
assert read == json.loads(flags.expected_outputs), "AssertionError of upstream's client"
"""


def outcomes(report: dict[str, Any]) -> dict[str, str]:
    """ "step: check" -> how it ended."""
    checks = [(step["name"], check) for step in report["steps"] for check in step["checks"]]
    return {f"{name}: {check['name']}": check["outcome"] for name, check in checks}


@pytest.mark.servers
def test_a_missed_target_is_told_and_everything_else_is_checked(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SLO is one that no machine meets."""
    upstream = tmp_path / "clients" / "end_to_end_grpc_client.py"
    upstream.parent.mkdir()
    upstream.write_text(UPSTREAM)
    monkeypatch.setenv("HF_TOKEN", "not-to-be-sent")
    file = tmp_path / "reports" / "accept.json"
    done = pipeline(
        "accept", *RECIPE, "--set", "slo={ttft_p95_ms: 0.001, itl_p95_ms: 100000}", *SMALL,
        "--upstream", str(upstream.parent), "--output", str(file), "--json", store=store,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads(file.read_text())
    found = outcomes(report)
    assert [name for name, outcome in found.items() if outcome == "failed"] == [
        "load: slo.ttft_p95_ms, 4 streams"
    ]
    assert found["load: slo.itl_p95_ms, 4 streams"] == "passed"
    assert [step["name"] for step in report["steps"]] == [step.name for step in STEPS]
    for name in (
        "build: package", "serve: ready", "golden: golden questions",
        "stream: tensorrt_llm_bls: joined chunks", "stream: ensemble: joined chunks", "stream: gateway: joined events",
        "upstream: end_to_end_grpc_client, ensemble, streamed", "draft: greedy with draft = greedy without",
        "draft: the draft is used", "draft: without it none is used", "cancel: streams that were left",
        "cancel: requests in the engine afterwards", "load: 4 streams, requests that failed",
        "metrics: Triton's page", "metrics: requests that the gateway counted",
        "stop: processes that are left", "stop: what had to be started again",
        "gate: top-1 agreement with the checkpoint", "gate: top-1 agreement with the original",
        "gate: perplexity by the engine off that by the checkpoint",
    ):  # fmt: skip
        assert found[name] == "passed", (name, found)
    blocks = next(
        check
        for step in report["steps"] if step["name"] == "memory"
        for check in step["checks"] if check["name"] == "KV cache blocks of tensorrt_llm"
    )  # fmt: skip
    assert blocks["deviation_percent"] is not None
    page = file.with_suffix(".md").read_text()
    assert page.startswith("# tiny-cpu: NOT accepted")
    assert "- **load, slo.ttft_p95_ms, 4 streams**: expected at most 0.00 ms" in page
    assert not any("not-to-be-sent" in path.read_text() for path in file.parent.iterdir())
    assert not list((store / "running").glob("tiny-cpu.json"))


@pytest.mark.servers
def test_a_build_that_fails_is_told_with_all_that_could_not_be_checked(store: Path, tmp_path: Path) -> None:
    """And `accept` comes to its end: nothing is served that the gate refuses."""
    recipe = load_recipe("tiny-cpu", ("quantization.gate.min_top1_agreement=1",))
    report = accept(recipe, Store(store), AcceptSettings(), tmp_path / "accept.json", progress=Silent())
    steps = {step.name: step for step in report.steps}
    assert [step.name for step in report.steps if step.failed] == ["build", "serve"]
    assert "top-1 agreement" in steps["build"].checks[0].note
    assert {steps[name].outcome for name in ("stream", "load", "stop", "gate")} == {"skipped"}
    assert report.finished
    assert not report.accepted
    assert AcceptanceReport.read(tmp_path / "accept.json").counts == report.counts


def test_wrong_options_are_told_together_before_anything_runs(store: Path, tmp_path: Path) -> None:
    lengths = ["--load", "prompt_tokens=100000", "--load", "output_tokens=100000"]
    words = [
        "tiny-cpu",
        "--skip",
        "serve",
        "--skip",
        "nothing",
        *lengths,
        "--output",
        str(tmp_path / "new"),
        "--store",
        str(store),
    ]
    with pytest.raises(InvalidInput, match="4 faults"):
        CliRunner().invoke(command, [*words, "--store", str(store)], catch_exceptions=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_draft_within_the_engine_is_held_to_a_deployment_without_it(store: Path, tmp_path: Path) -> None:
    """And a second run takes over what passed."""
    first = tmp_path / "first.json"
    done = pipeline("accept", "tiny-cpu", *SMALL, "--output", str(first), store=store, timeout_s=600)
    assert done.returncode == 0, done.stderr
    found = outcomes(json.loads(first.read_text()))
    assert found["undrafted: greedy with draft = greedy without"] == "passed"
    again = pipeline(
        "accept", "tiny-cpu", *SMALL, "--skip", "build", "--resume", str(first),
        "--output", str(tmp_path / "second.json"), store=store,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    second = json.loads((tmp_path / "second.json").read_text())
    assert {step["name"] for step in second["steps"] if not step["resumed"]} == {
        "plan", "build", "serve", "draft", "answers", "stop", "gate", "undrafted",
    }  # fmt: skip
    assert outcomes(second) == {**found, "build: package": "skipped"}


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_nothing_running(store: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeline.cli.main", "accept", "tiny-cpu", "--output", str(tmp_path)]
    environment = {**os.environ, "PIPELINE_STORE": str(store)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as run:
        wait_for(lambda: RunningServer.find(store / "running", "tiny-cpu") is not None, "the server", 240)
        started = list(processes_below(run.pid))
        assert {"serve", "gateway", "tritonserver", "tensorrt_llm"} <= {process.name for process in started}
        run.kill()
    wait_for(lambda: all(ProcessStat.of(process.pid) is None for process in started), "their end", 120)
    assert json.loads(next(tmp_path.glob("accept-*.json")).read_text())["finished"] is False


@pytest.mark.gpu
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("recipe", os.environ.get("PIPELINE_ACCEPT", "llama-3.1-8b-fp8").split(","))
def test_a_recipe_is_accepted_on_this_gpu(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The recipes of $PIPELINE_ACCEPT, built into the store that is used otherwise, too."""
    file = tmp_path_factory.getbasetemp() / f"accept-{Path(recipe).stem}.json"
    done = pipeline("accept", recipe, "--output", str(file), store=Store.default().root, timeout_s=4 * 3600)
    assert done.returncode == 0, file.with_suffix(".md").read_text() if file.exists() else done.stderr
