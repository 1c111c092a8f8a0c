"""Models that the runtimes' tests share, built once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

CHECKPOINTS = Path(__file__).resolve().parents[2] / "recipes/checkpoints"


class Pair(NamedTuple):
    target: Path
    draft: Path


@pytest.fixture(scope="session")
def cpu_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The checked-in target and draft as OpenVINO models."""
    from pipeline.progress import Silent
    from pipeline.runtimes.cpu.ir import build_ir

    folders = []
    for role in ("target", "draft"):
        folder = tmp_path_factory.mktemp(role)
        build_ir(CHECKPOINTS / f"support-{role}", folder, progress=Silent())
        folders.append(folder)
    return Pair(*folders)
