"""One server for all tests of this folder; those that harm a server start one of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.serving.ports import Ports
from pipeline.serving.server import TritonServer
from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment
from tests.support.served import package_support_pair

# Fixtures that start a Triton server, or a deployment of one: a test that uses one belongs to the tier of servers.
SERVED = {"server", "whole", "llm", "supervised"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = str(Path(__file__).parent)
    for item in items:
        served = isinstance(item, pytest.Function) and not SERVED.isdisjoint(item.fixturenames)
        if served and str(item.path).startswith(folder):
            item.add_marker(pytest.mark.servers)


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package_support_pair(tmp_path_factory.mktemp("support"))


@pytest.fixture(scope="session")
def moved(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in a folder whose name would break in the shell that Triton hands it to."""
    folder = tmp_path_factory.mktemp("moved") / "else where; $(touch gone)"
    shutil.copytree(package, folder)
    return folder


@pytest.fixture(scope="session")
def server(moved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("log") / "triton.log"
    with TritonServer.of_package(moved, ports=Ports.free(http=True), log_file=log) as server:
        yield server


@pytest.fixture(scope="session")
def cpu_package(package: Path) -> Path:
    return package


@pytest.fixture
def gpu_package(package: Path, tmp_path: Path) -> Path:
    """The package with the manifest of one H100's, started as one process: what starts a server sees no difference."""
    path = tmp_path / "package"
    shutil.copytree(package, path)
    launch = LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=1)
    pretended = gpu_deployment(launch)
    changed = {"runtime": "tensorrt", "requirements": pretended.requirements, "launch": launch}
    Deployment.load(path).model_copy(update=changed).save(path)
    return path
