"""One server for all tests of this folder; those that harm a server start one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.triton.server import TritonServer
from tests.support.served import package_support_pair


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package_support_pair(tmp_path_factory.mktemp("support"))


@pytest.fixture(scope="session")
def server(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("log") / "triton.log"
    with TritonServer.of_package(package, log_file=log) as server:
        yield server
