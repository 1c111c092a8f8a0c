"""A package for the CPU, and the same with the manifest of a GPU's: what starts a server cannot tell them apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.triton.deployment import Deployment, LaunchSpec
from tests.support.deployments import gpu_deployment
from tests.support.served import package_support_pair


@pytest.fixture(scope="session")
def cpu_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package_support_pair(tmp_path_factory.mktemp("support"))


@pytest.fixture
def gpu_package(cpu_package: Path, tmp_path: Path) -> Path:
    """For one H100, started as one process."""
    path = tmp_path / "package"
    shutil.copytree(cpu_package, path)
    launch = LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=1)
    pretended = gpu_deployment(launch)
    changed = {"runtime": "tensorrt", "requirements": pretended.requirements, "launch": launch}
    Deployment.load(path).model_copy(update=changed).save(path)
    return path
