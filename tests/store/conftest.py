"""Stores in a temporary directory, and builders as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pipeline.store import Artifact, ArtifactKey, Store

BUILDER = Path(__file__).with_name("builder.py")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "store")
    yield opened
    opened.close()


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., Artifact]:
    """Publish files as a package in the store of this test, which nobody uses afterwards."""

    def make(files: Mapping[str, bytes], number: int = 1) -> Artifact:
        def write(folder: Path) -> dict[str, object]:
            for name, data in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            return {}

        opened = Store(tmp_path / "store")
        found = opened.obtain(ArtifactKey("package", {"n": number}), write, recipe="tiny")
        opened.close()
        return found

    return make


@pytest.fixture
def builder(store: Store) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `builder.py` on the store of this test; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(BUILDER), str(store.root), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(BUILDER.parents[2])},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
