"""What a command prints as the next thing to type works when it is pasted, in another terminal and another folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.serving.ports import Ports
from tests.e2e.conftest import Build
from tests.support import CHECKPOINTS
from tests.support.command import Command, pasted

SETS = ("name=own-llama", "draft=null", "limits.max_output_tokens=8")


def run(arguments: list[str], folder: Path, store: str = "", typed: str = "") -> str:
    """What it printed on both streams."""
    done = subprocess.run(
        arguments,
        cwd=folder,
        env=os.environ | {"PIPELINE_STORE": store},
        input=typed,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}"


@pytest.mark.servers
def test_an_own_model_from_its_checkpoint_to_its_answer(build: Build, store: Path, tmp_path: Path) -> None:
    """init, build, serve, stream: with a blank in a path, overrides, a store given in either way, another address."""
    build("tiny-cpu", "draft=null", "quantization={format: none}")  # so that only the package is made below
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "my recipes").mkdir(parents=True)
    there.mkdir()
    pipeline = [sys.executable, "-m", "pipeline.cli.main"]
    own = ("my recipes/own llama.yaml", *(word for change in SETS for word in ("--set", change)))

    copied = run([*pipeline, "recipes", "copy", "tiny-cpu", "my recipes"], here)
    assert "exit code 0" in run(pasted(following(copied, "next: edit it, then (pipeline recipes .*)")), here)
    shelf = os.path.relpath(store, here)
    source = f"local:{CHECKPOINTS / 'support-target'}"
    made = run([*pipeline, "init", source, "--output", own[0]], here, shelf)
    building = following(made, "next: (pipeline build .*)")
    assert building.startswith(f"pipeline build '{here / own[0]}' --store ")
    assert "exit code 0" in run(pasted(building.replace(" build ", " plan ")), there)
    assert "exit code 0" in run([*pipeline, "recipes", "validate", own[0]], here)
    refused = run([*pipeline, "serve", *own, "--store", shelf], here)
    built = run(pasted(following(refused, "is not built, .* run (pipeline build .*), or give")), there)
    assert "exit code 0" in built
    serve = following(built, "next: (pipeline serve .*)")
    assert serve == following(run([*pipeline, "stream", *own, "Hi"], here, shelf), "(pipeline serve .*)")
    unserved = run([*pipeline, "gateway", *own], here, shelf)
    assert serve == following(unserved, "not served here; (pipeline serve .*), or --endpoint")

    port = Ports.free().grpc
    elsewhere = pasted(f"{serve} --set triton.address=127.0.0.2 --set triton.grpc_port={port}")
    with Command(elsewhere, tmp_path / "log", {"PIPELINE_STORE": ""}, there) as serving:
        serving.wait_for("stop: Ctrl-C")
        assert f"gRPC 127.0.0.2:{port}" in serving.said
        ask, talk = re.findall(r"ask: (.*)   talk: (.*)   stop: ", serving.said)[0]
        assert "\n8 tokens in " in run(pasted(ask), tmp_path)
        assert "exit code 0" in run(pasted(talk), tmp_path, typed="Hi\n")
        assert serving.stop(signal.SIGINT) == 0


def following(said: str, pattern: str) -> str:
    """The command in what was printed."""
    found = re.search(pattern, said)
    assert found is not None, said
    return found[1]
