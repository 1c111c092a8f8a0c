"""kill -9 in each stage, or Ctrl-C; the next build finishes with the same artifacts and leaves no debris."""

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
USUAL = ("package",)  # the last; the others are slow
RECIPE = ("tiny-cpu", "--set", "draft=null")


@pytest.fixture(scope="module")
def reference(build: Build, store: Path) -> dict[str, Path]:
    """Step -> artifact of a build that nobody disturbed."""
    build("tiny-cpu", "draft=null")
    steps = json.loads(pipeline("plan", *RECIPE, "--json", store=store).stdout)["steps"]
    return {step["step"]: store / "artifacts" / step["artifact"] for step in steps}


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=pytest.mark.servers if stage in USUAL else pytest.mark.slow)
        for stage in ORDER
    ],
)
def test_killed_in(stage: str, reference: dict[str, Path], tmp_path: Path) -> None:
    store = store_before(stage, reference, tmp_path)

    code = signalled_while_making(reference[stage].name, store, signal.SIGKILL, "build")

    assert code == -signal.SIGKILL
    assert not (store.artifacts / reference[stage].name).exists()
    done = pipeline("build", *RECIPE, "--json", store=tmp_path)
    assert done.returncode == 0, done.stderr
    made = {step["step"] for step in json.loads(done.stdout)["steps"] if step["made"]}
    assert made == set(ORDER[ORDER.index(stage) :]), "what was finished is not made again"
    for step in ORDER:
        assert contents(store.artifacts / reference[step].name) == contents(reference[step]), step
    assert list(store.work.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.servers),
        pytest.param(signal.SIGTERM, -15, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_build_that_serve_began(
    number: signal.Signals, code: int, reference: dict[str, Path], tmp_path: Path
) -> None:
    """As it ends `pipeline build`: no package is made, and no server is started that would then be stopped."""
    store = store_before("calibrate.target", reference, tmp_path)
    ended = signalled_while_making(reference["calibrate.target"].name, store, number, "serve", "--build")
    assert ended == code
    assert not (store.artifacts / reference["package"].name).exists()
    assert number == signal.SIGTERM or list(store.work.iterdir()) == [], "what was half made is put away"


def store_before(stage: str, reference: dict[str, Path], folder: Path) -> Store:
    """A store with all that is made before a stage."""
    store = Store(folder)
    store.artifacts.mkdir()
    for step in ORDER[: ORDER.index(stage)]:
        shutil.copytree(reference[step], store.artifacts / reference[step].name, copy_function=os.link)
    return store


def signalled_while_making(name: str, store: Store, number: signal.Signals, *verb: str) -> int:
    """Run a command on the recipe, and signal its whole process group while artifact `name` is being made."""
    command = [sys.executable, "-m", "pipeline.cli.main", *verb, *RECIPE]
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
        os.killpg(process.pid, number)
        process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode


def contents(artifact: Path) -> dict[str, str]:
    """File -> SHA-256, as the manifest has them."""
    return {name: entry.sha256 for name, entry in Manifest.load(artifact).files.items()}
