"""A whole build by another machine: a laptop with the core alone prints the script, and takes what comes back."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import CHECKPOINTS
from tests.support.core_only import Environment
from tests.support.machines import line, put_nvidia_smi
from tests.support.trtllm_build import put_trtllm_build

RECIPE: dict[str, Any] = {
    "name": "tiny-elsewhere",
    "model": {"source": "local:checkpoint"},
    "quantization": {"format": "none"},
    "runtime": {
        "kind": "tensorrt",
        "version": "1.2.1",
        "gpu": "h100-sxm-80g",
        "build_flags": ["monitor_memory"],
    },
    "limits": {"max_input_tokens": 64, "max_output_tokens": 64, "max_concurrency": 2},
}
FP8 = {"format": "fp8", "calibration": {"dataset": "support", "samples": 128, "max_tokens": 64}}


class Laptop:
    """A store and a recipe on a machine with no GPU, no builder, and the core of the project alone."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.folder, self.store = folder / "laptop", folder / "laptop" / "my store"
        self._core = Environment(folder / "site")
        shutil.copytree(CHECKPOINTS / "support-target", self.folder / "checkpoint")
        (self.folder / "own recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **sections}))

    def run(self, verb: str, *words: str, code: int = 0) -> str:
        """What a command on the recipe printed on both streams."""
        done = self._core.pipeline(verb, "own recipe.yaml", *words, store=self.store, folder=self.folder)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def print(self, executor: str) -> tuple[Path, list[list[str]]]:
        """The script, and the words of the commands for afterwards, without `pipeline`."""
        said = json.loads(self.run("build", "--executor", executor, "--json"))
        return Path(said["script"]), [shlex.split(command)[1:] for command in said["next"]]

    def follow(self, words: list[str], there: Path) -> str:
        """Run a command that was printed; folders that it names lie in the artifacts over `there`."""
        artifacts = there / "tiny-elsewhere-build" / "store" / "artifacts"
        found = [str(artifacts / word) if (artifacts / word).is_dir() else word for word in words]
        done = self._core.pipeline(*found, store=self.store)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


class GpuMachine:
    """Where the script runs: everything is installed, the checkpoint lies in another place."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "gpu machine"
        self.folder.mkdir()
        put_nvidia_smi(folder / "smi", monkeypatch, line())
        put_trtllm_build(folder / "program", monkeypatch)
        command = folder / "program" / "pipeline"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m pipeline.cli.main "$@"\n')
        command.chmod(0o755)
        self._command = str(command)

    def run(self, script: Path, checkpoint: str = "support-target", code: int = 0) -> str:
        environment = {"PIPELINE": self._command, "TARGET_CHECKPOINT": str(CHECKPOINTS / checkpoint)}
        done = subprocess.run(
            [script], cwd=self.folder, env=os.environ | environment, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.mark.servers
def test_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laptop = Laptop(tmp_path)
    script, following = laptop.print("print-all")
    assert not (laptop.store / "artifacts").exists(), "nothing is made here"
    assert [words[0] for words in following] == ["adopt", "build"]

    there = GpuMachine(tmp_path, monkeypatch)
    said = there.run(script, checkpoint="support-draft", code=1)
    assert "fetch.target would be another than fetch-" in said
    assert not (there.folder / "tiny-elsewhere-build" / "store" / "artifacts").exists(), "that is said first"
    said = there.run(script)
    assert "Where this script was printed, run:" in said

    package = next((there.folder / "tiny-elsewhere-build" / "store" / "artifacts").glob("package-*"))
    damaged = tmp_path / "damaged"
    shutil.copytree(package, damaged)
    damaged.chmod(0o755)
    (damaged / "deployment.json").chmod(0o644)
    (damaged / "deployment.json").write_text((damaged / "deployment.json").read_text().replace("64", "65"))
    assert "damaged on its way; copy it again (changed: deployment.json)" in laptop.run(
        "adopt", "package", str(damaged), code=2
    )
    assert "is package-" in laptop.run("adopt", "fetch.target", str(package), code=2)

    for words in following:
        taken = laptop.follow(words, there.folder)
    assert Path(taken) == laptop.store / "artifacts" / package.name
    assert (
        json.loads((Path(taken) / "manifest.json").read_text())["facts"]["adopted"]["host"]
        == os.uname().nodename
    )
    assert json.loads(laptop.run("serve", "--dry-run", "--json"))["built"] is True


@pytest.mark.servers
def test_without_extras_names_are_those_of_a_machine_that_has_them(tmp_path: Path) -> None:
    """Else nothing that is made elsewhere, or that a larger environment made, would be found here."""
    laptop = Laptop(tmp_path, quantization=FP8)
    here = json.loads(laptop.run("build", "--dry-run", "--json"))["steps"]
    command = [sys.executable, "-m", "pipeline.cli.main", "build", "own recipe.yaml", "--dry-run", "--json"]
    full = subprocess.run(command, cwd=laptop.folder, capture_output=True, text=True, timeout=60, check=True)
    assert [step["artifact"] for step in here] == [
        step["artifact"] for step in json.loads(full.stdout)["steps"]
    ]
    assert {name for step in here for name, version in step["tools"].items() if version != "absent"} == {
        "jinja2", "nvidia-modelopt", "tokenizers", "torch", "transformers",
    }  # fmt: skip


@pytest.mark.slow
def test_what_cannot_be_calibrated_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ModelOpt is missing here, so `print` has all of it made over there: calibrated, judged, compiled."""
    laptop = Laptop(tmp_path, quantization=FP8)
    said = laptop.run("build", "--executor", "print")
    assert "what comes before the engines cannot be made here" in said
    assert "calibrate: " in said
    script, following = laptop.print("print")
    assert [words[:1] + words[-2:-1] for words in following[:-1]] == [
        ["adopt", "evaluate"],
        ["adopt", "package"],
    ]
    there = GpuMachine(tmp_path, monkeypatch)
    there.run(script)
    for words in following:
        taken = laptop.follow(words, there.folder)
    assert Path(taken).name.startswith("package-")
    assert {path.name.partition("-")[0] for path in (laptop.store / "artifacts").iterdir()} == {
        "evaluate",
        "package",
    }
