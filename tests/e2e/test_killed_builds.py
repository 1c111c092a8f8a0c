"""kill -9 in each stage; the next build finishes with the same artifacts and leaves no debris."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.store import Manifest, Store
from tests.e2e.conftest import Build, pipeline

ORDER = ("fetch.target", "dataset", "calibrate.target", "evaluate", "build.target", "package")
RECIPE = ("tiny-cpu", "--set", "draft=null", "--set", "quantization.calibration.max_tokens=64")


@pytest.fixture(scope="module")
def reference(build: Build) -> dict[str, Path]:
    """Step -> artifact of a build that nobody disturbed."""
    summary = build("tiny-cpu", "draft=null", "quantization.calibration.max_tokens=64")
    return {step["step"]: Path(step["artifact"]) for step in summary["steps"]}


@pytest.mark.parametrize("stage", ORDER)
def test_killed_in(stage: str, reference: dict[str, Path], tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.artifacts.mkdir()
    for step in ORDER[: ORDER.index(stage)]:  # what was finished before
        shutil.copytree(reference[step], store.artifacts / reference[step].name, copy_function=os.link)

    kill_while_making(reference[stage].name, store)

    assert not (store.artifacts / reference[stage].name).exists()
    done = pipeline("build", *RECIPE, "--json", store=tmp_path)
    assert done.returncode == 0, done.stderr
    made = {step["step"] for step in json.loads(done.stdout)["steps"] if step["made"]}
    assert made == set(ORDER[ORDER.index(stage) :]), "what was finished is not made again"
    for step in ORDER:
        assert contents(store.artifacts / reference[step].name) == contents(reference[step]), step
    assert list(store.work.iterdir()) == []


def kill_while_making(name: str, store: Store) -> None:
    """Start a build and kill its whole process group while artifact `name` is being made."""
    command = [sys.executable, "-m", "pipeline.cli.main", "build", *RECIPE]
    environment = {**os.environ, "PIPELINE_STORE": str(store.root)}
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while not (store.work / name).is_dir():
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.0005)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL


def contents(artifact: Path) -> dict[str, str]:
    """File -> SHA-256, as the manifest has them."""
    return {name: entry.sha256 for name, entry in Manifest.load(artifact).files.items()}
