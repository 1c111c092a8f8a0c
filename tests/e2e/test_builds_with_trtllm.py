"""`pipeline build` for the tensorrt runtime, by each executor, with a trtllm-build that obeys upstream's contract."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.contracts.releases import container
from pipeline.store import Manifest
from pipeline.triton.deployment import Deployment
from tests.e2e.conftest import launch, pipeline
from tests.support import CHECKPOINTS
from tests.support.builders import DIGEST, FakeDocker
from tests.support.machines import line, put_nvidia_smi
from tests.support.trtllm_build import FAILS, put_trtllm_build
from tests.support.waiting import wait_for

RECIPE: dict[str, Any] = {
    "name": "tiny-tensorrt",
    "model": {"source": f"local:{CHECKPOINTS / 'support-target'}"},
    "draft": {"source": f"local:{CHECKPOINTS / 'support-draft'}", "max_draft_tokens": 4},
    "quantization": {"format": "none"},
    "runtime": {
        "kind": "tensorrt",
        "version": "1.2.1",
        "gpu": "h100-sxm-80g",
        "tensor_parallel": 2,
        "build_flags": ["fast_build", "gemm_plugin=bfloat16"],
    },
    "limits": {"max_input_tokens": 256, "max_output_tokens": 128, "max_concurrency": 4},
}
IMAGE = container("1.2.1").image


class Place:
    """A recipe and a store of a test's own, on a machine with two H100."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "store"
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(RECIPE))

    def build(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """What `--json` printed."""
        done = pipeline("build", str(self.recipe), "--json", *arguments, store=self.store)
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if code == 0 else {"error": done.stderr}

    def steps(self, *arguments: str) -> dict[str, Path]:
        """Step -> artifact."""
        return {step["step"]: Path(step["artifact"]) for step in self.build(*arguments)["steps"]}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    put_nvidia_smi(tmp_path / "smi", monkeypatch, "\n".join(line(index) for index in range(2)))
    return Place(tmp_path)


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the program, which is on PATH."""
    return put_trtllm_build(tmp_path / "program", monkeypatch)


def check_engines(artifacts: dict[str, Path], executor: str) -> None:
    target, draft = artifacts["build.target"], artifacts["build.draft"]
    assert {path.name for path in (target / "engine").iterdir()} == {
        "config.json",
        "rank0.engine",
        "rank1.engine",
    }
    assert {path.name for path in (draft / "engine").iterdir()} == {"config.json", "rank0.engine"}
    assert {path.name for path in target.iterdir()} == {
        "engine",
        "build.json",
        "manifest.json",
        "manifest.txt",
    }
    config = json.loads((target / "engine" / "config.json").read_text())["build_config"]
    assert (config["max_draft_len"], config["max_seq_len"]) == (4, 384 + 4)
    assert config["plugin_config"]["manage_weights"] is True, "the recipe's own flag, which has no value"
    assert config["input_timing_cache"] == "timing.cache", "an engine does not tell where it was built"
    facts = Manifest.load(target).facts
    assert facts == json.loads((target / "build.json").read_text())
    assert facts["build"]["executor"] == executor  # type: ignore[index, call-overload]
    assert Deployment.load(artifacts["package"]).requirements is not None


@pytest.mark.servers
@pytest.mark.usefixtures("builder")
def test_native(place: Place) -> None:
    foreseen = launch(place.recipe, place.store, built=False)
    artifacts = place.steps()
    assert foreseen == launch(place.recipe, place.store, built=True)
    assert f"/{artifacts['package'].name},target=" in str(foreseen["docker"])
    check_engines(artifacts, "native")
    facts = Manifest.load(artifacts["build.target"]).facts["build"]
    assert facts["gpu"] == "NVIDIA H100 80GB HBM3"  # type: ignore[index, call-overload]
    cache = place.store / "caches" / "timing" / "1.2.1-h100-sxm-80g.cache"
    assert cache.read_bytes() == b"timing cache"
    assert not any(step["made"] for step in place.build()["steps"]), "a second build finds all of it"


@pytest.mark.servers
def test_docker(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = put_trtllm_build(tmp_path / "inside", monkeypatch)
    monkeypatch.setenv("PATH", os.environ["PATH"].replace(f"{inside}{os.pathsep}", "", 1))
    docker = FakeDocker(tmp_path / "docker", monkeypatch, inside=inside)
    docker.set(registry={IMAGE: DIGEST})
    artifacts = place.steps("--gpus", "1,0")
    check_engines(artifacts, "docker")
    facts = Manifest.load(artifacts["build.target"]).facts["build"]
    assert facts["image"] == IMAGE  # type: ignore[index, call-overload]
    assert facts["image_digest"] == f"nvcr.io/nvidia/tritonserver@{DIGEST}"  # type: ignore[index, call-overload]
    assert docker.run[docker.run.index("--gpus") + 1] == '"device=1,0"'


@pytest.mark.servers
@pytest.mark.usefixtures("builder")
def test_a_failure(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILS, "gpu_memory")
    error = place.build(code=1)["error"]
    assert "| [TRT] [E] Error Code 2: OutOfMemory" in error
    assert "likely cause: the GPU ran out of memory" in error
    assert "Traceback (most recent call last)" not in error.replace("  | Traceback", "")
    monkeypatch.delenv(FAILS)
    place.build()
    assert list((place.store / "work").iterdir()) == []


# Builders that are slow


def slow(programs: Path) -> tuple[Path, Path]:
    """The builder now touches the first file when it begins, and goes on when the second is there."""
    begun, go = programs / "begun", programs / "go"
    (programs / "trtllm-build").rename(programs / "prompt")
    program = programs / "trtllm-build"
    program.write_text(
        f"#!/bin/sh\necho building; touch '{begun}'\nwhile [ ! -e '{go}' ]; do sleep 0.02; done\n"
        f"exec '{programs}/prompt' \"$@\"\n"
    )
    program.chmod(0o755)
    return begun, go


@pytest.mark.parametrize(
    "executor",
    [pytest.param("native", marks=pytest.mark.servers), pytest.param("docker", marks=pytest.mark.slow)],
)
def test_killed(
    place: Place, builder: Path, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = slow(builder)
    FakeDocker(tmp_path / "docker", monkeypatch, inside=builder).set(images={IMAGE: DIGEST})
    command = [sys.executable, "-m", "pipeline.cli.main", "build", str(place.recipe), "--executor", executor]
    environment = os.environ | {"PIPELINE_STORE": str(place.store)}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(begun.exists, "the build of an engine")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    go_on = threading.Timer(1.0, go.touch)
    go_on.start()
    check_engines(place.steps("--executor", executor), executor)
    go_on.join()
    assert builders(builder) == []
    assert list((place.store / "work").iterdir()) == []


@pytest.mark.slow
def test_two_at_once(place: Place, builder: Path) -> None:
    """One builds, the other waits and takes the result; and another recipe builds beside both."""
    begun, go = slow(builder)
    results: list[dict[str, Path]] = []
    sets = ((), (), ("--set", "limits.max_concurrency=8"))
    threads = [threading.Thread(target=lambda more=more: results.append(place.steps(*more))) for more in sets]
    for thread in threads:
        thread.start()
    wait_for(begun.exists, "the build of an engine")
    go.touch()
    for thread in threads:
        thread.join(120)
    assert len({result["build.target"] for result in results}) == 2
    for result in results:
        check_engines(result, "native")


def builders(programs: Path) -> list[int]:
    """Processes of the program that are still there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(programs).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
