"""What the tests of the stages share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.calibrated import Calibrations, answers_of
from tests.support.hub import LoopbackHub, asked_hub


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> Calibrations:
    return Calibrations(tmp_path_factory.mktemp("calibrations"))


@pytest.fixture(autouse=True)
def few_words() -> Iterator[None]:
    with answers_of(4):
        yield


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with asked_hub(monkeypatch, tmp_path, retries=3) as running:
        yield running


@pytest.fixture
def into(tmp_path: Path) -> Path:
    folder = tmp_path / "into"
    folder.mkdir()
    return folder
