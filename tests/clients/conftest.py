"""Foreign programs, unchanged, against tiny-cpu behind its gateway: `scripts/test -m clients`. See README.md here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.serving.served import ServedDeployment
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from tests.support.programs import Program, Unavailable

MODEL = "tiny-cpu"


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave the folder alone where its tier is not wanted: to import its files takes seconds."""
    return True if "not clients" in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder belongs to the tier, and has time to install a program on a slow machine."""
    folder = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """What is built lies in the store that $PIPELINE_STORE names, if it does: then it is built once for many runs."""
    named = os.environ.get("PIPELINE_STORE")
    return Store.at(Path(named) if named else tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def served(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDeployment]:
    """tiny-cpu, built and served behind its gateway; its `record` says where."""
    folder = tmp_path_factory.mktemp("clients")
    deployment = ServedDeployment.start(
        (MODEL, "--build", "--set", "serving.http=true", *store.argv),
        MODEL,
        store.running,
        folder / "logs",
        deadline_s=600,
    )
    try:
        yield deployment
    finally:
        deployment.stop()


@pytest.fixture(scope="session")
def variables(served: ServedDeployment) -> dict[str, str]:
    """What programs know of the deployment, as variables of their environment."""
    record = served.record
    package = record.deployment.parent
    return {
        "OPENAI_BASE_URL": f"{record.gateway_url}/v1",
        "OPENAI_API_KEY": "none",
        "GATEWAY_URL": record.gateway_url,
        "MODEL": MODEL,
        "TOKENIZER": str(package / Deployment.load(package).tokenizer_dir),
        "TRITON_HTTP": record.http_url.removeprefix("http://"),
        "TRITON_GRPC": record.grpc_url,
    }


@pytest.fixture(scope="session")
def program(variables: dict[str, str]) -> Callable[[str], Program]:
    """`program("openai_python")` -> the program of that folder, installed, which knows the deployment."""

    def install(name: str) -> Program:
        try:
            return Program.install(name, variables)
        except Unavailable as error:
            pytest.skip(str(error))

    return install
