"""A fetch as a process of its own, to be killed: `fetcher.py STORE ORG/NAME`. Prints the artifact's path.

All that can be printed is: progress, log messages of every level, warnings, and a traceback with its causes.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.progress import Lines
from pipeline.recipe import HubSource
from pipeline.sources import resolve_checkpoint
from pipeline.stages.fetch import fetch
from pipeline.store import ArtifactKey, Store


@dataclass(frozen=True)
class Asked:
    source: HubSource
    revision: str | None = None
    allow_pickle: bool = False


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
