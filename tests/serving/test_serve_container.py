"""`pipeline serve` in a container: a stand-in Docker runs the real Triton with what the image would be given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.client import Client
from pipeline.contracts.releases import container
from pipeline.machine.programs import Software
from pipeline.serving.ports import Ports
from pipeline.triton.running import RunningServer
from tests.support.builders import DIGEST, FakeDocker
from tests.support.command import Command
from tests.support.launchers import serving_docker
from tests.support.machines import line, put_nvidia_smi
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers

IMAGE = container("1.2.1").image
DIST = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """This machine has one H100 and, in its Python, what the image would have."""
    made = serving_docker(tmp_path / "docker", monkeypatch)
    put_nvidia_smi(made.programs, monkeypatch, line())
    libraries = tmp_path / "site"
    for name, version in DIST.items():
        info = libraries / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(libraries))
    monkeypatch.setenv("NVIDIA_TRITON_SERVER_VERSION", "26.07")
    made.set(images={IMAGE: DIGEST})
    return made


CONTAINER = ("--set", "triton.container=true")


def deploying(package: Path, folder: Path, *options: str) -> Command:
    """`pipeline serve` of a package, with a store below `folder`."""
    arguments = ["serve", "--package", str(package), "--no-gateway", *CONTAINER, *options]
    command = [sys.executable, "-m", "pipeline.cli.main", *arguments]
    return Command(command, folder / "log", {"PIPELINE_STORE": str(folder / "store")})


def ports() -> tuple[Ports, list[str]]:
    free = Ports.free()
    return free, ["--set", f"triton.grpc_port={free.grpc}", "--set", f"triton.metrics_port={free.metrics}"]


def test_from_a_package_to_an_answer_and_back(gpu_package: Path, docker: FakeDocker, tmp_path: Path) -> None:
    free, options = ports()
    running = tmp_path / "store" / "running"
    with deploying(gpu_package, tmp_path, "--gpus", "0", *options) as deployment:
        deployment.wait_for("ready after")
        record = RunningServer.find(running, "support")
        assert record is not None
        assert record.grpc_url == f"127.0.0.1:{free.grpc}"
        with Client(record.grpc_url) as client:
            assert client.generate("Hello", max_tokens=4).text is not None
        assert deployment.stop() == 0
    assert RunningServer.find(running, "support") is None
    (run,) = [call for call in docker.called("run") if "--entrypoint" not in call]
    name = run[run.index("--name") + 1]
    assert docker.called("rm", "--force", name)
    assert f"{IMAGE.partition(':')[0]}@{DIGEST}" in run
    assert run[run.index("--gpus") + 1] == '"device=0"'
    assert "--shm-size=2048m" in run
    assert f"type=bind,source={gpu_package},target=/deployment,readonly" in run
    assert f"127.0.0.1:{free.grpc}:8001" in run
    assert not docker.called("pull")


@pytest.mark.slow
def test_the_container_goes_when_its_owner_is_killed(
    gpu_package: Path, docker: FakeDocker, tmp_path: Path
) -> None:
    _, options = ports()
    with deploying(gpu_package, tmp_path, *options) as deployment:
        deployment.wait_for("ready after")
        deployment.process.kill()
    wait_for(lambda: bool(docker.called("rm", "--force")), "the removal of the container")
    (run,) = [call for call in docker.called("run") if "--entrypoint" not in call]
    assert docker.called("rm", "--force", run[run.index("--name") + 1])


def test_an_image_that_is_not_here_is_pulled_after_the_host_was_looked_at(
    gpu_package: Path, docker: FakeDocker, tmp_path: Path
) -> None:
    docker.set(images={})
    docker.set(registry={IMAGE: None})
    _, options = ports()
    with deploying(gpu_package, tmp_path, *options) as deployment:
        deployment.wait_for("ready after")
        assert deployment.stop() == 0
    assert [call[0] for call in docker.calls if call[0] != "info"][:3] == ["image", "pull", "image"]
    (run,) = [call for call in docker.called("run") if "--entrypoint" not in call]
    assert IMAGE in run  # it came without a digest


def refusal(gpu_package: Path, tmp_path: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", "serve", "--package", str(gpu_package), *CONTAINER, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PIPELINE_STORE": str(tmp_path / "store")},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_the_wrong_gpu_is_refused_before_anything_is_pulled(
    gpu_package: Path, docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.set(images={})
    put_nvidia_smi(
        docker.programs, monkeypatch, line(name="NVIDIA L4", capability="8.9", total=23034, driver="535.1")
    )
    text = refusal(gpu_package, tmp_path)
    assert "support cannot be served here: 3 faults" in text
    assert "compute capability 8.9, it is for 9.0" in text
    assert "pipeline build RECIPE --set runtime.gpu=l4-24g" in text, "of a package it is not known"
    assert "535.1 is older than 590.44.01" in text
    assert {call[0] for call in docker.calls} == {"image", "info"}


def test_a_docker_without_gpus_is_refused_before_anything_is_pulled(
    gpu_package: Path, docker: FakeDocker, tmp_path: Path
) -> None:
    docker.set(images={})
    docker.set(info={"ServerVersion": "28.3.2", "Runtimes": {"runc": {}}})
    text = refusal(gpu_package, tmp_path)
    assert "containers cannot be given GPUs" in text
    assert "NVIDIA Container Toolkit" in text
    assert not docker.called("pull")


def test_the_wrong_image_is_refused_before_anything_is_loaded(
    gpu_package: Path, docker: FakeDocker, tmp_path: Path
) -> None:
    docker.set(images={"own:1": None})
    info = tmp_path / "site" / "tensorrt_llm-1.2.1.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.1.0\n")
    text = refusal(gpu_package, tmp_path, "--set", "triton.image=own:1")
    assert "TensorRT-LLM 1.1.0 is installed, it was made for 1.2.1" in text
    assert all("--entrypoint" in call for call in docker.called("run"))


def test_dry_run_prints_and_runs_nothing(gpu_package: Path, docker: FakeDocker, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from pipeline.cli.serve import command

    _, options = ports()
    arguments = [
        "--package",
        str(gpu_package),
        *CONTAINER,
        "--store",
        str(tmp_path),
        "--dry-run",
        *options,
    ]
    shown = CliRunner().invoke(command, arguments)
    assert shown.exit_code == 0, shown.output
    assert "docker \\\n  run \\\n" in shown.output
    assert "ready within 128 s" in shown.output
    made = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).stdout)
    assert made["docker"][:2] == ["docker", "run"]
    assert made["command"][0] == "/opt/tritonserver/bin/tritonserver"
    assert made["environment"] == {"PIPELINE_TRITON_GRPC": "127.0.0.1:8001"}
    assert made["shm_mib"] == 2048
    assert made["findings"] == []
    assert not docker.called("run")
    assert not docker.called("pull")


@pytest.mark.usefixtures("docker")
def test_software_is_asked_of_the_image() -> None:
    from pipeline.machine.programs import software_of_image

    assert software_of_image(IMAGE, ("numpy", "no_such_module")) == Software(
        "1.2.1", "10.14.1.48", "26.07", ("no_such_module",)
    )
