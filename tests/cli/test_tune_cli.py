"""`pipeline tune`, as a user calls it: keys, dry runs, faults; and a real search that is killed and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.bench.tune.report import TuneReport
from pipeline.cli.tune import command
from pipeline.errors import InvalidInput
from pipeline.machine.processes import processes_below
from pipeline.process_state import ProcessStat
from pipeline.recipe import load_recipe


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a store of its own, in a folder of its own."""
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def as_json(*arguments: str) -> Any:
    result = CliRunner().invoke(command, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_keys_are_listed_with_values_and_reasons() -> None:
    told = as_json("tiny-cpu", "--dry-run", "--study", "fix=runtime.threads")
    keys = {key["key"]: key for key in told["space"]["keys"]}
    assert keys["limits.max_concurrency"]["own"] == 16
    assert all(len(key["values"]) > 1 and key["reason"] for key in keys.values())
    assert told["space"]["left_out"]["runtime.threads"] == "by fix"
    assert "does not read it" in told["space"]["left_out"]["kv_cache.memory_fraction"]
    printed = CliRunner().invoke(command, ["tiny-cpu", "--dry-run"])
    assert "[16]" in printed.stdout


def test_a_dry_run_says_what_would_be_tried_and_serves_nothing(tmp_path: Path) -> None:
    told = as_json("tiny-cpu", "--dry-run", "--study", "trials=5", "--study", "fix=limits.max_concurrency=8")
    assert told["trials"] == 5
    assert "limits.max_concurrency" not in told["keys"]
    # Of the value that is fixed, not of the file.
    assert told["loads"] == "8 at a time, 4 at a time, 2 at a time"
    assert told["prompts"] == "calibration"
    assert told["objective"].startswith("throughput")
    assert "minutes" in told["time"]
    judged = as_json(
        "tiny-cpu", "--dry-run", "--set", "slo.itl_p95_ms=50", "--study", "keys=draft.max_draft_tokens"
    )
    assert judged["objective"].startswith("goodput")
    assert (judged["trials"], judged["keys"]) == (8, "draft.max_draft_tokens")
    assert not (tmp_path / "store" / "tuning").exists()


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "tiny-cpu-tuned.yaml").write_text("")
    words = [
        "tiny-cpu",
        "--study",
        "trials=0",
        "--study",
        "keys=limits.max_conc,scheduler.policy",
        "--study",
        "fix=nothing",
    ]
    result = CliRunner().invoke(command, [*words, "--load", "concurrency=x", "--study", "rounds=-1"])
    assert isinstance(result.exception, InvalidInput)
    assert result.exception.exit_code == 2
    text = str(result.exception)
    for told in (
        "trials",
        "did you mean limits.max_concurrency",
        "scheduler.policy",
        "--study: fix = nothing",
        "--load: concurrency",
    ):
        assert told in text
    assert "--study: rounds = -1" in text
    assert "give --force" in text


@pytest.mark.servers
@pytest.mark.timeout(900)
def test_a_real_search_is_killed_goes_on_and_ends_with_advice(tmp_path: Path) -> None:
    """Real builds, real servers, real loads. What was measured before kill -9 is not measured again."""
    output = tmp_path / "tuned.yaml"
    words = [
        *(sys.executable, "-m", "pipeline.cli.main", "tune", "tiny-cpu", "--json", "--output", str(output)),
        *("--set", "slo.ttft_p95_ms=60000", "--set", "slo.itl_p95_ms=60000"),
        *(
            "--study",
            "keys=draft.max_draft_tokens,limits.max_concurrency",
            "--study",
            "trials=3",
            "--study",
            "rounds=2",
        ),
        *("--load", "concurrency=4", "--load", "requests=8", "--load", "warmup_s=0"),
    ]
    first = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    kept = wait_for(tmp_path / "store" / "tuning", "*/trial-000.json", first)
    before = kept.read_bytes()
    below = [process.pid for process in processes_below(first.pid)]
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    deadline = time.monotonic() + 300
    while any(ProcessStat.of(pid) is not None for pid in below):
        assert time.monotonic() < deadline, "a server outlives the search that started it"
        time.sleep(0.2)

    second = subprocess.run(words, capture_output=True, text=True, timeout=800, check=False)
    assert second.returncode == 0, second.stderr
    report = TuneReport.model_validate_json(second.stdout)
    assert kept.read_bytes() == before
    # On a busy machine, one may look slow in its first seconds, and is stopped.
    assert sum(trial.outcome in ("measured", "stopped") for trial in report.trials) == 3
    assert report.trials[0].changes == ()
    assert report.recommendation.verdict in ("tuned", "keep")
    assert report.recommendation.reason
    assert report.seconds["serve"] > 0
    assert output.exists() == (report.recommendation.verdict == "tuned")
    if output.exists():
        changed = load_recipe("tiny-cpu", [*report.recommendation.changes])
        assert load_recipe(output).limits == changed.limits
    page = (Path(report.folder) / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert report.recommendation.reason.split(";")[0][:20] in page


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[bytes]) -> Path:
    """Wait for a file that a process makes."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        if found := list(folder.glob(pattern)):
            return found[0]
        assert process.poll() is None, "it ended before"
        time.sleep(0.1)
    raise AssertionError(f"{pattern} did not come")
