"""`pipeline plan calibrate`, as a user calls it: on a processor and on a GPU, and with files that do not fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline.bench import result as bench_result
from pipeline.bench import summary
from pipeline.bench.forecast import LoadForecaster
from pipeline.bench.load_settings import Load
from pipeline.bench.result import BenchResult, LevelResult
from pipeline.cli.bench import command as bench
from pipeline.cli.plan import command
from pipeline.client.testing import FakeServer, Reply
from pipeline.errors import InvalidInput
from pipeline.machine.host import processor_name
from pipeline.plan.performance import Workload
from pipeline.plan.performance.engine import token_acceptance
from pipeline.recipe import load_recipe
from pipeline.store import Store
from tests.support import CHECKPOINTS
from tests.support.benched import failed_level, level, result

pytest.importorskip("scipy")

GPU = "llama-3.1-8b-fp8"
LENGTHS = ("--prompt-tokens", "100", "--output-tokens", "32")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Store(tmp_path / "store")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, tuple(map(str, arguments)))


def benched(path: Path, levels: list[LevelResult], **target: Any) -> Path:
    """A file of `pipeline bench --output`."""
    made: BenchResult = result(levels, machine={"processor": processor_name()})
    made.model_copy(update={"target": {**made.target, **target}}).write(path)
    return path


def levels(*loads: int) -> list[LevelResult]:
    work = Workload(100, 32)
    return [
        level(
            Load("concurrency", load),
            lambda batch: (20 + 3.0 * batch, 4 + 0.5 * batch),
            work=work,
            acceptance=0.4,
        )
        for load in loads
    ]


def test_a_processor_has_a_forecast_once_it_was_measured(tmp_path: Path, store: Store) -> None:
    files = [
        benched(tmp_path / f"{n}.json", levels(*loads), runtime="cpu")
        for n, loads in enumerate(((1, 4), (16,)))
    ]
    assert "speed on" not in run("tiny-cpu").stdout
    assert LoadForecaster.of(load_recipe("tiny-cpu", ()), store).none_because

    found = run("calibrate", "tiny-cpu", *files)
    assert found.exit_code == 0, found.output
    (written,) = store.calibrations.iterdir()
    assert str(written) in found.stdout
    assert "constants fitted to 2 files" in found.stdout

    outlook = json.loads(run("tiny-cpu", *LENGTHS, "--json").stdout)["performance"]
    assert processor_name() in outlook["source"]
    assert (
        outlook["tokens_per_s"]["low"] <= outlook["tokens_per_s"]["value"] <= outlook["tokens_per_s"]["high"]
    )
    assert "left out of the fit" in run("tiny-cpu", *LENGTHS).stdout.replace("\n  ", " ")
    assert "speed on" not in run("tiny-cpu", "--calibration", "none").stdout

    seen = levels(4)
    (point,) = LoadForecaster.of(load_recipe("tiny-cpu", ()), store).forecast(seen).points
    assert point is not None
    assert point.output_tokens_per_s == pytest.approx(seen[0].output_tokens_per_s, rel=0.3)


def test_drafts_that_a_benchmark_counted_are_calibrated_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the counters of a server, by a file of `pipeline bench`, to the acceptance that a plan computes with."""
    for name in ("_LATE_MS", "_BUSY"):  # however busy this machine is
        monkeypatch.setattr(summary, name, math.inf)
    monkeypatch.setattr(bench_result, "_STALL_S", math.inf)
    drafted = Reply(["word"] * 8, delay_s=0.002, input_tokens=100, draft_tokens=8, accepted_tokens=5)
    files = {name: tmp_path / f"{name}.json" for name in ("counted", "silent")}
    for reported, script in (
        ("counted", drafted),
        ("silent", replace(drafted, draft_tokens=0, accepted_tokens=0)),
    ):
        with FakeServer(script) as server:
            asked = ("--url", server.url, "--tokenizer", str(CHECKPOINTS / "support-target"))
            load = [f"--load={text}" for text in ("concurrency=1,4", "requests=16", "warmup_s=0")]
            made = CliRunner().invoke(bench, (*asked, *load, "--output", str(files[reported])))
        assert made.exit_code == 0, made.output
    assert {level.acceptance for level in BenchResult.read(files["counted"]).levels} == {0.625}

    constants = tmp_path / "mine.yaml"
    found = run("calibrate", "tiny-cpu", files["counted"], "--output", constants)
    assert found.exit_code == 0, found.output
    # Of four tokens a round, five eighths are accepted.
    expected = token_acceptance(0.625, 4)
    assert yaml.safe_load(constants.read_text())["reach"]["acceptance"] == pytest.approx(expected, abs=1e-3)
    planned = json.loads(run("tiny-cpu", *LENGTHS, "--calibration", constants, "--json").stdout)
    assert planned["performance"]["acceptance"] == pytest.approx(expected, abs=1e-3)
    with pytest.raises(InvalidInput, match="how many of the draft's tokens were accepted is not in it"):
        CliRunner().invoke(command, ("calibrate", "tiny-cpu", str(files["silent"])), catch_exceptions=False)


def test_a_gpu_is_forecast_by_its_own_measurements(tmp_path: Path, store: Store) -> None:
    file = benched(tmp_path / "h100.json", levels(1, 16), runtime="tensorrt", gpu="h100-sxm-80g")
    elsewhere = tmp_path / "mine.yaml"
    found = run("calibrate", GPU, file, "--output", elsewhere, "--json")
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["file"] == str(elsewhere)
    assert document["calibration"] == yaml.safe_load(elsewhere.read_text())
    assert document["calibration"]["errors"]["itl"]["before"] > 0.1
    assert {row["concurrency"] for row in document["loads"]} == {1, 16}
    assert not store.calibrations.exists()

    def source(*options: object) -> str:
        return str(json.loads(run(GPU, *LENGTHS, "--json", *options).stdout)["performance"]["source"])

    assert source() == "published figures"
    assert "h100-sxm-80g" in source("--calibration", elsewhere)
    assert source("--set", "runtime.gpu=h200-sxm-141g") == "published figures"


def test_what_does_not_fit_is_told_at_once_and_nothing_is_written(tmp_path: Path, store: Store) -> None:
    other = benched(tmp_path / "other.json", levels(1), runtime="pytorch", gpu="b200-180g")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    found = run("calibrate", GPU, other, broken)
    text = str(found.exception)
    for word in ("other.json", "pytorch", "tensorrt", "b200-180g", "h100-sxm-80g", "broken.json", "levels"):
        assert word in text
    assert not store.calibrations.exists()


def test_loads_that_no_constant_explains_are_not_used(tmp_path: Path) -> None:
    silent = levels(4)[0].model_copy(update={"acceptance": None})
    few = levels(2)[0].model_copy(update={"cached_share": 0.5})
    slow = levels(8)[0]
    late = slow.model_copy(
        update={"generator": slow.generator.model_copy(update={"limits": "it was 90 ms late"})}
    )
    stalled = slow.model_copy(update={"longest_silence_s": 9.0})
    useless = [failed_level(Load("concurrency", 1), "gone"), silent, few, late, stalled, *levels(32)]
    file = benched(tmp_path / "useless.json", useless, runtime="cpu")
    found = run("calibrate", "tiny-cpu", file)
    for words in (
        "no answer of two or more tokens", "how many of the draft's tokens", "response cache", "more than the 16",
        "it was 90 ms late", "silent for 9.0 s",
    ):  # fmt: skip
        assert words in str(found.exception)
    kept = run("calibrate", "tiny-cpu", benched(file, [*useless, *levels(2)], runtime="cpu"))
    assert kept.exit_code == 0, kept.output
    assert kept.stdout.count("warning: not used") == len(useless)


def test_constants_that_forecast_worse_than_before_are_not_kept(tmp_path: Path, store: Store) -> None:
    """Loads of which none tells anything of the others: each is at another pace."""
    paces = {1: 6.0, 4: 60.0, 8: 7.0, 16: 90.0}
    work = Workload(100, 32)
    made = [
        level(Load("concurrency", load), lambda _, gap=gap: (30.0, gap), work=work)
        for load, gap in paces.items()
    ]
    file = benched(tmp_path / "odd.json", made, runtime="tensorrt", gpu="h100-sxm-80g")
    found = run("calibrate", GPU, file)
    assert found.exit_code == 1, found.output
    assert "not kept: half the figures" in found.stdout
    assert not store.calibrations.exists()
    written = tmp_path / "odd.yaml"
    assert run("calibrate", GPU, file, "--output", written).exit_code == 0
    assert written.is_file()


def test_constants_are_written_as_yaml() -> None:
    found = run("calibrate", "tiny-cpu", "a.json", "--output", "a.html")
    assert "--output = a.html: must end in .yaml" in str(found.exception)


def test_constants_of_another_device_are_refused(tmp_path: Path) -> None:
    file = benched(tmp_path / "h100.json", levels(1, 8), runtime="tensorrt", gpu="h100-sxm-80g")
    made = tmp_path / "mine.yaml"
    assert run("calibrate", GPU, file, "--output", made).exit_code == 0
    refused = run("tiny-cpu", "--calibration", made)
    assert "h100-sxm-80g" in str(refused.exception)
    assert "is of tensorrt, and the recipe's is cpu" in str(refused.exception)
