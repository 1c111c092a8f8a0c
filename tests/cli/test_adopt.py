"""`pipeline build --executor …` and `pipeline adopt`, as a user calls them: what is said, where, and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Run
from tests.support import CHECKPOINTS
from tests.support.machines import line, put_nvidia_smi
from tests.support.trtllm_build import put_trtllm_build


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "my recipe.yaml"
    values = {
        "name": "tiny",
        "model": {"source": f"local:{CHECKPOINTS / 'support-target'}"},
        "quantization": {"format": "none"},
        "runtime": {"kind": "tensorrt", "version": "1.2.1", "gpu": "h100-sxm-80g"},
        "limits": {"max_input_tokens": 64, "max_output_tokens": 64, "max_concurrency": 2},
    }
    path.write_text(yaml.safe_dump(values))
    return str(path)


def fill(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the script on a machine that has all; the folder of the target's engine."""
    with monkeypatch.context() as there:
        put_trtllm_build(folder / "program", there)
        put_nvidia_smi(folder / "smi", there, line())
        subprocess.run([script], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return folder / "tiny-engines" / "target"


def test_print(run: Run, recipe: str, tmp_path: Path) -> None:
    done = run("build", recipe, "--set", "limits.max_concurrency=3", "--executor", "print")
    assert done.code == 0
    script = Path(done.out.strip())
    assert script == tmp_path / "store" / "reports" / "tiny-build.sh"
    assert os.access(script, os.X_OK)
    words = f"'{recipe}' --set limits.max_concurrency=3 --store {tmp_path / 'store'}"
    assert f"next: pipeline adopt {words} build.target tiny-engines/target\n" in done.err
    assert f"next: pipeline build {words}\n" in done.err
    assert f"#          pipeline adopt {words} build.target tiny-engines/target" in script.read_text()
    assert "--max_batch_size 3 \\\n" in script.read_text()
    said = run("build", recipe, "--executor", "print", "--json").json
    assert [part["step"] for part in said["handed_over"]] == ["build.target"]
    assert said["next"][-1] == f"pipeline build '{recipe}' --store {tmp_path / 'store'}"


def test_adopt(run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(run("build", recipe, "--executor", "print").out.strip(), tmp_path, monkeypatch)
    done = run("adopt", recipe, "build.target", str(folder))
    assert done.code == 0, done.err
    artifact = Path(done.out.strip())
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert manifest["facts"]["build"]["executor"] == "adopted"
    assert manifest["facts"]["build"]["gpu"] == "NVIDIA H100 80GB HBM3"
    assert f"adopted build.target from {folder}" in done.err
    done = run("build", recipe)
    assert done.code == 0, done.err
    assert Path(done.out.strip(), "deployment.json").is_file()
    assert "in the store already" in run("adopt", recipe, "build.target", str(folder)).err
    assert run("store", "gc", "--drop-handed-over", "tiny", "--yes").code == 2, "none waits any more"


def test_a_build_keeps_what_waits_for_its_engine_until_it_is_given_up(
    run: Run, recipe: str, tmp_path: Path
) -> None:
    """The build in a process of its own, since one that builds holds what it has used."""
    store = tmp_path / "store"

    def collected(*words: str) -> set[str]:
        return {item["name"] for item in run("store", "gc", "--yes", *words, "--json").json["garbage"]}

    command = [sys.executable, "-m", "pipeline.cli.main", "build", recipe, "--executor", "print", "--json"]
    subprocess.run([*command, "--store", str(store)], stdout=subprocess.PIPE, timeout=120, check=True)
    made = {path.name for path in (store / "artifacts").iterdir()}
    assert collected() == set()
    assert collected("--drop-handed-over", "tiny") == made
    assert collected() == set()


def test_adopt_what_is_not_as_asked_for(
    run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums may be right and the engine wrong: it is judged as one that was built here."""
    folder = fill(run("build", recipe, "--executor", "print").out.strip(), tmp_path, monkeypatch)
    config = folder / "engine" / "config.json"
    config.write_text(config.read_text().replace('"max_batch_size": 2', '"max_batch_size": 1'))
    with (folder / "SHA256SUMS").open("w") as sums:
        files = ["engine/config.json", "engine/rank0.engine", "build.log", "facts.txt"]
        subprocess.run(["sha256sum", *files], cwd=folder, stdout=sums, check=True)
    done = run("adopt", recipe, "build.target", str(folder))
    assert done.code == 1
    assert "max_batch_size" in done.err
    assert list((tmp_path / "store" / "work").iterdir()) == []


def test_adopt_for_a_changed_recipe(
    run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(run("build", recipe, "--executor", "print").out.strip(), tmp_path, monkeypatch)
    done = run("adopt", recipe, "--set", "limits.max_concurrency=4", "build.target", str(folder))
    assert done.code == 2
    assert "a checkpoint or the tools have changed since" in done.err


def test_adopt_what_cannot_be(run: Run, recipe: str, tmp_path: Path) -> None:
    done = run("adopt", recipe, "pakage", str(tmp_path))
    assert (done.code, "no step 'pakage'; this build has fetch.target" in done.err) == (2, True)
    for step, named in (("package", recipe), ("build.target", "tiny-cpu")):
        done = run("adopt", named, step, str(tmp_path))
        assert (done.code, "no manifest.json: not an artifact of another store" in done.err) == (2, True)
    done = run("adopt", recipe, "build.target", str(tmp_path))
    assert (done.code, "not a folder that a script of --executor print filled" in done.err) == (2, True)
    assert run("adopt", recipe, "build.target", str(tmp_path / "none")).code == 2


def test_nothing_here_builds(run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for executor, said in (
        ("auto", "nothing here can run trtllm-build 1.2.1"),
        ("native", "there is no trtllm-build on PATH"),
        ("docker", "there is no 'docker' on PATH"),
    ):
        done = run("build", recipe, "--executor", executor)
        assert (done.code, said in done.err) == (2, True), done.err
    assert not (tmp_path / "store" / "artifacts").exists(), "before any work"
    assert run("build", recipe, "--until", "convert.target").code == 0, "which needs no builder"


def test_what_is_built_needs_no_executor(
    run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        put_trtllm_build(tmp_path / "program", before)
        assert run("build", recipe, "--until", "build.target").code == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    shutil.rmtree(tmp_path / "program")
    assert run("build", recipe).code == 0


def test_a_deadline(run: Run, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = put_trtllm_build(tmp_path / "program", monkeypatch) / "trtllm-build"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    done = run("build", recipe, "--executor", "native", "--executor-timeout-s", "0.5")
    assert done.code == 1
    assert "took longer than 0.5 s" in done.err
