"""Requests that tests send to a hub on loopback, and their answers.

As a program, a fetch to be killed: `fetching.py STORE ORG/NAME` prints the artifact's path, and all else that can be
printed: progress, log messages of every level, warnings, and a traceback with its causes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.errors import SourceError
from pipeline.progress import Lines, Silent, Task
from pipeline.recipe import HubSource
from pipeline.sources import resolve_checkpoint
from pipeline.stages.fetch import fetch
from pipeline.store import ArtifactKey, Store

REPO = "org/name"
SOURCE = HubSource(REPO)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True)
class Asked:
    """As a recipe's `model` section."""

    source: HubSource = SOURCE
    revision: str | None = None
    allow_pickle: bool = False


class Recorder(Silent):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tasks: list[Recorder.Recorded] = []

    @dataclass
    class Recorded:
        label: str
        total: float | None
        done: float = 0

        def advance(self, amount: float = 1) -> None:
            self.done += amount

    def say(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:  # noqa: ARG002
        self.tasks.append(self.Recorded(label, total))
        yield self.tasks[-1]


def get(
    into: Path, asked: Asked = Asked(), progress: Silent | None = None, *, allow_faults: bool = False
) -> dict[str, object]:
    resolved = resolve_checkpoint(asked)
    return fetch(resolved, into, progress=progress or Silent(), allow_faults=allow_faults)  # type: ignore[return-value]


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(into: Path, asked: Asked = Asked()) -> str:
    with pytest.raises(SourceError) as caught:
        get(into, asked)
    assert caught.value.exit_code == 2
    return str(caught.value)


def main(root: str, repo: str) -> None:
    logging.basicConfig(level=logging.DEBUG)
    progress = Lines(interval_s=0.05)
    store = Store(Path(root))
    resolved = resolve_checkpoint(Asked(HubSource(repo)), store=store, progress=progress)
    key = ArtifactKey("fetch", resolved.identity, resumable=True)

    def make(into: Path) -> dict[str, object]:
        return fetch(resolved, into, progress=progress)  # type: ignore[return-value]

    print(store.obtain(key, make, recipe="test", progress=progress).path, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
