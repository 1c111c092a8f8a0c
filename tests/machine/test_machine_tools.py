"""Docker, MPI, Triton and builders, from what they print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.machine.docker import read_docker
from pipeline.machine.programs import EngineBuilder, Mpi, read_builder, read_mpi, read_triton
from tests.support.machines import HANGS, put_tool

RUNC = {"io.containerd.runc.v2": {"path": "runc"}, "runc": {"path": "runc"}}
INFO = {
    "ServerVersion": "28.3.2",
    "Runtimes": RUNC,
    "DefaultRuntime": "runc",
    "DockerRootDir": "/var/lib/docker",
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin", "name=cgroupns"],
    "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"],
}
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
DENIED = (
    "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: "
    'Get "http://%2Fvar%2Frun%2Fdocker.sock/v1.50/info": dial unix /var/run/docker.sock: connect: permission denied'
)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    return tmp_path / "tools"


def docker_that_says(tools: Path, info: dict[str, Any]) -> None:
    put_tool(
        tools,
        "docker",
        json.dumps(info),
        does="assert arguments == ['info', '--format', '{{json .}}'], arguments",
    )


@pytest.mark.usefixtures("tools")
def test_no_docker() -> None:
    found = read_docker()
    assert (found.version, found.problem) == (None, "there is no docker on PATH")
    assert "NVIDIA Container Toolkit" in found.fix


def test_docker_without_gpus(tools: Path, tmp_path: Path) -> None:
    docker_that_says(tools, INFO)
    found = read_docker(root=tmp_path)
    assert (found.version, found.problem, found.folder) == ("28.3.2", "", "/var/lib/docker")
    assert (found.gpu_runtime, found.rootless) == (False, False)


@pytest.mark.parametrize(
    ("more", "how"),
    [
        ({"Runtimes": {**RUNC, "nvidia": {"path": "nvidia-container-runtime"}}}, "nvidia runtime"),
        ({"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}, "CDI"),
    ],
    ids=["runtime", "cdi"],
)
def test_docker_with_gpus(tools: Path, tmp_path: Path, more: dict[str, Any], how: str) -> None:
    docker_that_says(tools, INFO | more)
    found = read_docker(root=tmp_path)
    assert (found.gpu_runtime, found.gpu_how) == (True, how)


def test_specifications_of_devices_and_the_hook_count(tools: Path, tmp_path: Path) -> None:
    docker_that_says(tools, INFO)
    put_tool(tools, "nvidia-container-runtime-hook")
    assert read_docker(root=tmp_path).gpu_how == "nvidia hook"
    (tmp_path / "etc/cdi").mkdir(parents=True)
    (tmp_path / "etc/cdi/nvidia.yaml").touch()
    assert read_docker(root=tmp_path).gpu_how == "CDI"


def test_rootless(tools: Path, tmp_path: Path) -> None:
    docker_that_says(tools, INFO | {"SecurityOptions": ["name=seccomp", "name=rootless"]})
    assert read_docker(root=tmp_path).rootless


@pytest.mark.parametrize(
    ("complaint", "fix"),
    [(DOWN, "systemctl start docker"), (DENIED, "sudo usermod -aG docker $USER, and log in again")],
)
def test_a_daemon_that_cannot_be_reached(tools: Path, complaint: str, fix: str) -> None:
    put_tool(tools, "docker", "{}", complains=complaint, code=1)
    found = read_docker()
    assert (found.version, found.problem, found.fix) == (None, f"docker failed: {complaint}", fix)


def test_an_older_client_succeeds_without_a_daemon(tools: Path) -> None:
    docker_that_says(tools, {"ServerErrors": [DOWN], "ClientInfo": {}})
    assert read_docker().problem == f"docker failed: {DOWN}"


def test_podman_in_dockers_place(tools: Path) -> None:
    docker_that_says(tools, {"host": {"arch": "amd64"}, "version": {"Version": "5.1.2"}})
    assert "Podman" in read_docker().problem


def test_a_docker_that_hangs(tools: Path) -> None:
    put_tool(tools, "docker", does=HANGS)
    found = read_docker(0.3)
    assert (found.problem, found.fix) == ("docker does not answer within 0.3 s", "systemctl restart docker")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "mpirun (Open MPI) 4.1.8\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
            ("Open MPI", "4.1.8"),
        ),
        (
            "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
            ("Open MPI", "5.0.11"),
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701\n", ("Intel MPI", "2021.13")),
        ("HYDRA build details:\n    Version:                                 4.2.2\n", ("MPICH", "4.2.2")),
    ],
    ids=["openmpi4", "openmpi5", "intel", "mpich"],
)
def test_mpi(tools: Path, text: str, found: tuple[str, str]) -> None:
    put_tool(tools, "mpirun", text, does="assert arguments == ['--version'], arguments")
    assert read_mpi() == Mpi(*found)


def test_no_mpi_and_a_strange_one(tools: Path) -> None:
    assert read_mpi().problem == "there is no mpirun on PATH"
    put_tool(tools, "mpirun", "hello\n")
    assert "does not say whose it is: 'hello'" in read_mpi().problem


def test_triton_on_path_or_where_containers_have_it(tools: Path, tmp_path: Path) -> None:
    assert read_triton({"PATH": str(tools)}, tmp_path).path is None
    inside = tmp_path / "opt/tritonserver/bin/tritonserver"
    inside.parent.mkdir(parents=True)
    inside.touch()
    assert read_triton({"PATH": str(tools)}, tmp_path).path == str(inside)
    on_path = put_tool(tools, "tritonserver")
    declared = {
        "PATH": str(tools),
        "NVIDIA_TRITON_SERVER_VERSION": "26.07",
        "TRITON_SERVER_VERSION": "2.60.0",
    }
    found = read_triton(declared, tmp_path)
    assert (found.path, found.release, found.version) == (str(on_path), "26.07", "2.60.0")


def test_no_builder_and_one_of_a_python_without_tensorrt_llm(tools: Path) -> None:
    assert read_builder() == EngineBuilder(None, None)
    tools.mkdir(exist_ok=True)
    program = tools / "trtllm-build"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    assert read_builder() == EngineBuilder(str(program), None)
