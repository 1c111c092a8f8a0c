"""`pipeline build` on the recipe of the quickstart: what it makes, that it is made once, and that the gate holds."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.build import command
from pipeline.errors import UserError
from pipeline.plan.artifact_sizes import SMALL_FILES, artifact_sizes
from pipeline.prepare.model_probe import probe_models
from pipeline.recipe import load_recipe
from pipeline.store import Manifest, Store
from tests.e2e.conftest import Build, pipeline

STEPS = {
    "fetch.target", "fetch.draft", "dataset", "calibrate.target", "evaluate", "build.target", "build.draft", "package",
}  # fmt: skip


@pytest.fixture(scope="module")
def built(build: Build, store: Path) -> Store:
    build("tiny-cpu")
    return Store(store)


@pytest.fixture(scope="module")
def again(built: Store) -> list[dict[str, Any]]:
    """Steps of a second build."""
    done = pipeline("build", "tiny-cpu", "--json", store=built.root)
    assert done.returncode == 0, done.stderr
    steps: list[dict[str, Any]] = json.loads(done.stdout)["steps"]
    return steps


def test_a_second_build_makes_nothing(again: list[dict[str, Any]]) -> None:
    assert not any(step["made"] for step in again)


def test_every_artifact_is_intact(built: Store) -> None:
    done = pipeline("store", "verify", "--json", store=built.root)
    assert done.returncode == 0, done.stdout


def test_weights_take_what_was_reserved_for_them(built: Store, again: list[dict[str, Any]]) -> None:
    """In the package and in all that a build leaves, without what is reserved for small files besides."""
    recipe = load_recipe("tiny-cpu")
    probes = probe_models(recipe, built, offline=True)
    known = artifact_sizes(
        recipe, {role: probe.sizes for role, probe in probes.items() if probe.sizes is not None}
    )
    made = {step["step"]: Path(step["artifact"]) for step in again}
    package = weights(made.pop("package"))
    assert package <= known.package - SMALL_FILES <= 1.2 * package
    assert sum(map(weights, made.values())) <= known.build - known.package - SMALL_FILES


def weights(artifact: Path) -> int:
    """Bytes of the weights in an artifact."""
    files = Manifest.load(artifact).files
    return sum(file.bytes for name, file in files.items() if name.endswith((".bin", ".safetensors")))


def test_a_dry_run_says_that_nothing_is_left(built: Store) -> None:
    done = pipeline("build", "tiny-cpu", "--dry-run", "--json", store=built.root)
    steps = json.loads(done.stdout)["steps"]
    assert {step["step"] for step in steps} == STEPS
    assert {step["state"] for step in steps} == {"in store"}


def test_progress_names_every_step_and_where_it_is(tmp_path: Path) -> None:
    done = pipeline("build", "tiny-cpu", "--until", "fetch.target", store=tmp_path)
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.strip())
    assert place.parent == tmp_path / "artifacts"
    assert "fetch.target" in done.stderr
    assert str(place) in done.stderr


def test_a_tighter_gate_stops_the_build_although_all_is_built(built: Store) -> None:
    done = pipeline(
        "build", "tiny-cpu", "--set", "quantization.gate.min_top1_agreement=1.0", store=built.root
    )
    assert done.returncode == 3
    assert "top-1 agreement" in done.stderr
    assert "What to try" in done.stderr
    report = Path(done.stderr.rpartition("report: ")[2].strip())
    assert report.is_file()
    assert json.loads(report.with_name("report.json").read_text())["verdict"]["passed"] is False


def test_the_gate_keeps_a_report_of_what_passed(built: Store) -> None:
    reports = [json.loads(path.read_text()) for path in built.reports.glob("tiny-cpu-*/report.json")]
    assert reports
    for report in reports:
        assert [metric["files"] for metric in report["metrics"]] == ["hf", "trtllm-tp1"]


def test_a_read_only_store_that_has_all_is_enough(built: Store, tmp_path: Path) -> None:
    """Nothing is to be made, so nothing has to be written, the gate's report neither."""
    shutil.copytree(built.artifacts, tmp_path / "artifacts", copy_function=os.link)
    with read_only(tmp_path):
        done = pipeline("build", "tiny-cpu", store=tmp_path)
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).parent == tmp_path / "artifacts"
        other = pipeline("build", "tiny-cpu", "--set", "limits.max_output_tokens=200", store=tmp_path)
    assert other.returncode == 1
    assert f"pipeline: the store {tmp_path} cannot be written: Read-only file system" in other.stderr


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder on a filesystem that takes no writes, those of root neither."""
    done = subprocess.run(
        ["mount", "--bind", str(folder), str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_planning_a_pinned_commit_needs_no_hub(tmp_path: Path) -> None:
    words = ["llama-3.1-8b-fp8", "--set", "draft=null", "--dry-run", "--store", str(tmp_path)]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert "calibrate.target" in done.output


def test_an_unknown_step_is_answered_by_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"calibrate\.target"):
        CliRunner().invoke(
            command, ["tiny-cpu", "--until", "calibrat", "--store", str(tmp_path)], catch_exceptions=False
        )
    assert not (tmp_path / "artifacts").exists()
