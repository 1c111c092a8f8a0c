"""Which artifacts nobody needs any longer, and their removal.

Needed is all that the newest package of each recipe was made from, followed through the inputs in the
manifests, and all that a process uses or makes right now. "Newest" is the package that its recipe obtained
last, so going back to older settings makes theirs the newest again. Reports and the records of servers are
left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.store import files, lock
from pipeline.store.artifact import Artifact
from pipeline.store.store import Store

_ROOT_STAGE = "package"
_REMOVED = ".removed"  # suffix in work/ of an artifact whose removal was begun


@dataclass(frozen=True)
class Garbage:
    """A directory that can go."""

    path: Path
    name: str  # of the artifact, and so of its lock
    bytes: int
    reason: str


def roots(artifacts: Iterable[Artifact]) -> dict[str, Artifact]:
    """Recipe name -> its newest package. `artifacts` come in the order of `Store.list`, used last first."""
    newest: dict[str, Artifact] = {}
    for artifact in artifacts:
        if artifact.manifest.stage == _ROOT_STAGE:
            newest.setdefault(artifact.manifest.recipe, artifact)
    return newest


def reachable(start: Iterable[Artifact], artifacts: Iterable[Artifact]) -> frozenset[str]:
    """Digests of `start` and of all that they were made from, directly or not, as far as it is there."""
    by_digest: Mapping[str, Artifact] = {artifact.digest: artifact for artifact in artifacts}
    seen: set[str] = set()
    waiting = [artifact.digest for artifact in start]
    while waiting:
        digest = waiting.pop()
        if digest in by_digest and digest not in seen:
            seen.add(digest)
            waiting.extend(by_digest[digest].manifest.inputs.values())
    return frozenset(seen)


def find_garbage(store: Store) -> tuple[Garbage, ...]:
    """What `collect` would remove now, leftovers first. Changes nothing."""
    artifacts = store.list()
    kept = reachable(roots(artifacts).values(), artifacts)
    found = []
    for path in sorted(store.work.iterdir()) if store.work.is_dir() else ():
        name = path.name.removesuffix(_REMOVED)
        reason = "removal was interrupted" if path.name != name else "left by a builder that was killed"
        found.append(Garbage(path, name, files.tree_bytes(path), reason))
    for name, problem in sorted(store.scan()[1].items()):
        path = store.artifacts / name
        found.append(Garbage(path, name, files.tree_bytes(path), problem))
    for artifact in artifacts:
        if artifact.digest not in kept:
            made_for = artifact.manifest.recipe
            older = artifact.manifest.stage == _ROOT_STAGE
            reason = (
                f"older package of {made_for}"
                if older
                else f"made for {made_for}, no newest package needs it"
            )
            found.append(Garbage(artifact.path, artifact.name, artifact.manifest.total_bytes, reason))
    return tuple(garbage for garbage in found if _is_free(store, garbage.name))


def collect(store: Store, garbage: Iterable[Garbage]) -> tuple[Garbage, ...]:
    """Remove `garbage`, but what came into use meanwhile; returns what was removed."""
    return tuple(item for item in garbage if remove(store, item))


def remove(store: Store, garbage: Garbage) -> bool:
    """Remove one directory unless a process uses or makes it; if killed, the next `collect` finishes it."""
    held = _lock(store, garbage.name)
    if held is None:
        return False
    try:
        path = garbage.path
        if path.parent == store.artifacts and path.exists():
            files.remove_tree(store.work / (path.name + _REMOVED))
            os.rename(path, store.work / (path.name + _REMOVED))
            path = store.work / (path.name + _REMOVED)
        files.remove_tree(path)
    except OSError as error:
        raise StoreError(f"{garbage.path}: cannot be removed: {error.strerror}") from error
    finally:
        held.release(unlink=True)
    return True


def _is_free(store: Store, name: str) -> bool:
    held = _lock(store, name)
    if held is not None:
        held.release()
    return held is not None


def _lock(store: Store, name: str) -> lock.Lock | None:
    try:
        store.locks.mkdir(parents=True, exist_ok=True)
        store.work.mkdir(parents=True, exist_ok=True)
        return lock.exclusive(store.locks / f"{name}.lock")
    except OSError as error:
        raise StoreError(f"the store {store.root} cannot be written: {error.strerror}") from error
