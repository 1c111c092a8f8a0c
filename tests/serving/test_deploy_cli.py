"""`pipeline deploy` and `pipeline serve` without a GPU: what they refuse, and the package for this machine's CPU."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cli.deploy import command
from pipeline.errors import PipelineError, UserError
from pipeline.progress import Lines, Silent
from pipeline.serving.announcement import Announcement
from pipeline.serving.launch import Ports
from pipeline.triton.running import RunningServer
from tests.support.command import Command, pasted


def deploy(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a RECIPE, or a folder with --package"),
        (["tiny-cpu", "--package", "/tmp"], "name a RECIPE, or a folder with --package"),
        (["tiny-cpu", "--json"], "--json goes with --dry-run"),
        (["tiny-cpu", "--gpus", "a,b"], "write numbers of GPUs with commas between them, like 0,1"),
        (["tiny-cpu", "--target", "kubernetes"], "is not one of 'local', 'docker'"),
    ],
)
def test_what_cannot_be_asked_for(arguments: list[str], said: str) -> None:
    done = deploy(*arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_a_folder_without_a_package(tmp_path: Path) -> None:
    done = deploy("--package", str(tmp_path), "--store", str(tmp_path / "store"))
    assert isinstance(done.exception, UserError)
    assert "no deployment.json" in str(done.exception)


def test_a_package_for_the_cpu_needs_no_container(cpu_package: Path, tmp_path: Path) -> None:
    done = deploy("--package", str(cpu_package), "--store", str(tmp_path), "--target", "docker")
    assert isinstance(done.exception, PipelineError)
    assert "support is for this machine's CPU: --target local" in str(done.exception)


def test_dry_run_of_a_package_for_the_cpu(cpu_package: Path, tmp_path: Path) -> None:
    free = Ports.free()
    done = deploy(
        *("--package", str(cpu_package), "--store", str(tmp_path), "--dry-run", "--json"),
        *("--grpc-port", str(free.grpc), "--start-timeout-s", "90"),
    )
    made = json.loads(done.stdout)
    assert made["command"][0].endswith("/bin/tritonserver")
    assert f"--grpc-port={free.grpc}" in made["command"]
    assert made["docker"] == []
    assert made["start_deadline_s"] == 90
    assert made["environment"] == {"PIPELINE_TRITON_GRPC": f"127.0.0.1:{free.grpc}"}
    assert not (tmp_path / "running").exists()


def test_a_package_is_served_and_announced(cpu_package: Path, tmp_path: Path) -> None:
    arguments = ["deploy", "--package", str(cpu_package), "--log", str(tmp_path / "triton.log")]
    program = [sys.executable, "-m", "pipeline.cli.main", *arguments]
    with Command(program, tmp_path / "log", {"PIPELINE_STORE": str(tmp_path)}) as deploying:
        deploying.wait_for("ready after")
        assert RunningServer.find(tmp_path / "running", "support") is not None
        assert "for at most 120 s" in deploying.said
        (ask,) = re.findall(r"ask: (.*)   talk: ", deploying.said)
        asked = subprocess.run(pasted(ask), capture_output=True, text=True, timeout=60, check=False)
        assert asked.returncode == 0, f"without a recipe it is found by its address: {ask}\n{asked.stderr}"
        assert asked.stdout.strip()
        assert deploying.stop() == 0
    assert RunningServer.find(tmp_path / "running", "support") is None
    assert "Started GRPCInferenceService" in (tmp_path / "triton.log").read_text()


def test_a_server_that_cannot_be_announced_is_served_all_the_same(tmp_path: Path) -> None:
    """Its store may be one that is only read."""
    (tmp_path / "running").write_text("no folder")
    told = io.StringIO()
    record = RunningServer(
        1, "localhost:1", "http://localhost:2", "http://localhost:3", tmp_path, "2026-01-01"
    )
    announcement = Announcement(tmp_path / "running", "r", record, ["triton"])
    with pytest.raises(UserError, match="serve Triton alone with --no-gateway"):
        announcement.claim(Silent(), needed=True)
    announcement.claim(Lines(told))
    announcement.set_state("triton", "ready")
    announcement.withdraw()
    assert f"{tmp_path / 'running'} cannot be written (File exists)" in told.getvalue()
    assert "--url" in told.getvalue()


def test_what_is_let_pass_is_marked_and_refuses_no_more(
    gpu_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no driver, no Docker
    arguments = ("--package", str(gpu_package), "--store", str(tmp_path / "store"), "--target", "local")
    allowed = ("--allow", "host.gpus", "--allow", "port.version")
    shown = deploy(*arguments, *allowed, "--dry-run", "--json")
    marks = {one["rule"]: one["allowed"] for one in json.loads(shown.stdout)["findings"]}
    assert {name: marks[name] for name in ("host.gpus", "port.version", "host.programs")} == {
        "host.gpus": True, "port.version": True, "host.programs": False,
    }  # fmt: skip
    done = deploy(*arguments, *allowed)
    assert isinstance(done.exception, UserError)
    assert "[host.programs]" in str(done.exception)
    assert "[host.gpus]" not in str(done.exception)
    assert "allowed: runtime.gpu = h100-sxm-80g: there is no nvidia-smi" in done.output
