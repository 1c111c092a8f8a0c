"""Garbage collection: finds the artifacts that are no longer needed, and removes them.

Needed is all that the newest package of each recipe was made from, followed through the inputs in the
manifests; all that a build has which goes on on another machine (`AwaitedBuild`); and all that a process uses or
makes right now. "Newest" is the package that its recipe obtained last, so going back to older settings makes
theirs the newest again. Reports and the records of servers are left alone.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.store import files
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


@dataclass(frozen=True)
class AwaitedBuild:
    """A build that goes on on another machine, and comes back by `pipeline adopt`."""

    recipe: str
    script: str  # what was printed for the other machine
    created: str  # UTC, ISO 8601, to the second
    result: str  # name of the artifact with which the build is complete
    artifacts: tuple[str, ...]  # names of all that the build consists of, there or not

    def record(self, store: Store) -> None:
        """Keep the artifacts from `find_garbage` until the result is in the store, or the record is dropped."""
        path = self._file(store)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        draft.replace(path)

    def drop(self, store: Store) -> None:
        """Give the build up: what only it needs may go."""
        self._file(store).unlink(missing_ok=True)

    def _file(self, store: Store) -> Path:
        return store.handed_over / f"{self.result}.json"


def awaited_builds(store: Store) -> tuple[AwaitedBuild, ...]:
    """The builds that other machines have not given back yet, the oldest first.

    Raises:
        StoreError: a record is damaged, so that it is unknown which artifacts it needs.
    """
    builds = []
    for path in store.handed_over.glob("*.json"):
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            builds.append(AwaitedBuild(**{**read, "artifacts": tuple(read["artifacts"])}))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path}: is not a record of a build ({error}); remove it") from error
    waiting = (build for build in builds if not (store.artifacts / build.result).is_dir())
    return tuple(sorted(waiting, key=lambda build: (build.created, build.result)))


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
    digests: set[str] = set()
    waiting = [artifact.digest for artifact in start]
    while waiting:
        digest = waiting.pop()
        if digest in by_digest and digest not in digests:
            digests.add(digest)
            waiting.extend(by_digest[digest].manifest.inputs.values())
    return frozenset(digests)


def find_garbage(
    store: Store, given_up: Collection[AwaitedBuild] = (), wanted: Collection[Artifact] = ()
) -> tuple[Garbage, ...]:
    """Find what `collect` would remove now, leftovers first. Changes nothing.

    Args:
        store: The store to clean.
        given_up: Builds that keep nothing.
        wanted: Artifacts that stay, with all that they were made from.
    """
    artifacts = store.list()
    waiting = {name for build in awaited_builds(store) if build not in given_up for name in build.artifacts}
    awaited = (artifact for artifact in artifacts if artifact.name in waiting)
    needed = reachable((*roots(artifacts).values(), *awaited, *wanted), artifacts)
    collected = []
    for path in sorted(store.work.iterdir()) if store.work.is_dir() else ():
        name = path.name.removesuffix(_REMOVED)
        reason = "removal was interrupted" if path.name != name else "left by a builder that was killed"
        collected.append(Garbage(path, name, files.tree_bytes(path), reason))
    for name, problem in sorted(store.scan()[1].items()):
        path = store.artifacts / name
        collected.append(Garbage(path, name, files.tree_bytes(path), problem))
    for artifact in artifacts:
        if artifact.digest not in needed:
            made_for = artifact.manifest.recipe
            older = artifact.manifest.stage == _ROOT_STAGE
            reason = (
                f"older package of {made_for}"
                if older
                else f"made for {made_for}, no newest package needs it"
            )
            collected.append(Garbage(artifact.path, artifact.name, artifact.manifest.total_bytes, reason))
    free = []
    for garbage in collected:
        if (acquired := store.take_lock(garbage.name)) is not None:
            acquired.release()
            free.append(garbage)
    return tuple(free)


def collect(store: Store, garbage: Iterable[Garbage]) -> tuple[Garbage, ...]:
    """Remove `garbage`, but what came into use meanwhile; returns what was removed."""
    waiting = {f"{build.result}.json" for build in awaited_builds(store)}
    for record in store.handed_over.glob("*.json"):
        if record.name not in waiting:  # it came back, and would count again when its result is removed
            record.unlink(missing_ok=True)
    return tuple(item for item in garbage if remove(store, item))


def remove(store: Store, garbage: Garbage) -> bool:
    """Remove one directory unless a process uses or makes it; if killed, the next `collect` finishes it."""
    acquired = store.take_lock(garbage.name)
    if acquired is None:
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
        acquired.release(unlink=True)
    return True
