"""A store, and a hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.store import Store
from tests.support.hub import LoopbackHub, asked_hub


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with asked_hub(monkeypatch, tmp_path) as running:
        yield running
