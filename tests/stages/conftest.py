"""What the tests of the stages share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from pipeline.sources import hub_errors
from tests.support.calibrated import Calibrations
from tests.support.hub import LoopbackHub


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> Calibrations:
    return Calibrations(tmp_path_factory.mktemp("calibrations"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url + "/")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(hub_errors, "DELAYS_S", (0.01, 0.01, 0.01))
        yield running


@pytest.fixture
def into(tmp_path: Path) -> Path:
    folder = tmp_path / "into"
    folder.mkdir()
    return folder
