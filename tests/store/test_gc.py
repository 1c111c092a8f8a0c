"""What goes and what stays."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.store import Artifact, ArtifactKey, Store
from pipeline.store.gc import collect, find_garbage

Start = Callable[..., "subprocess.Popen[str]"]


class Shelf:
    """Obtains artifacts one after the other, and uses them no longer."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._time = 0

    def obtain(
        self, stage: str, number: int, inputs: Mapping[str, Artifact] | None = None, recipe: str = "a"
    ) -> Artifact:
        key = ArtifactKey(stage, {"n": number}, {role: item.digest for role, item in (inputs or {}).items()})

        def make(directory: Path) -> dict[str, int]:
            (directory / "file").write_bytes(bytes(100))
            return {}

        artifact = self.store.obtain(key, make, recipe=recipe)
        self.store.close()
        self._time += 1
        os.utime(artifact.path, ns=(self._time, self._time))
        return artifact

    def build(self, number: int, fetched: Artifact, recipe: str = "a") -> list[Artifact]:
        calibrated = self.obtain("calibrate", number, {"checkpoint": fetched}, recipe)
        engine = self.obtain("build", number, {"checkpoint": calibrated}, recipe)
        return [
            calibrated,
            engine,
            self.obtain("package", number, {"target": engine, "tokenizer": fetched}, recipe),
        ]


def names(store: Store) -> set[str]:
    return {artifact.name for artifact in store.list()}


def test_an_empty_store_has_no_garbage(store: Store) -> None:
    assert find_garbage(store) == ()
    assert collect(store, find_garbage(store)) == ()


def test_all_that_the_newest_package_was_made_from_stays(store: Store) -> None:
    shelf = Shelf(store)
    fetched = shelf.obtain("fetch", 1)
    old = shelf.build(1, fetched)
    new = shelf.build(2, fetched)
    garbage = find_garbage(store)
    assert {item.name for item in garbage} == {artifact.name for artifact in old}
    reasons = {item.name: item.reason for item in garbage}
    assert reasons[old[2].name] == "older package of a"
    assert reasons[old[0].name] == "made for a, no newest package needs it"
    assert {item.bytes for item in garbage} == {100}
    assert names(store) == {a.name for a in [fetched, *old, *new]}, "looking removes nothing"

    assert collect(store, garbage) == garbage
    assert names(store) == {a.name for a in [fetched, *new]}
    assert find_garbage(store) == ()
    assert list(store.work.iterdir()) == []
    assert not [path for path in store.locks.iterdir() if path.name.startswith(old[0].name)]


def test_each_recipe_keeps_its_own(store: Store) -> None:
    shelf = Shelf(store)
    fetched = shelf.obtain("fetch", 1)
    kept = [*shelf.build(1, fetched, "a"), *shelf.build(2, fetched, "b"), fetched]
    unfinished = shelf.obtain("calibrate", 9, {"checkpoint": fetched}, "c")
    assert [item.name for item in collect(store, find_garbage(store))] == [unfinished.name]
    assert names(store) == {artifact.name for artifact in kept}


def test_going_back_to_older_settings_makes_them_the_newest(store: Store) -> None:
    shelf = Shelf(store)
    fetched = shelf.obtain("fetch", 1)
    first = shelf.build(1, fetched)
    second = shelf.build(2, fetched)
    shelf.build(1, fetched)
    collect(store, find_garbage(store))
    assert names(store) == {artifact.name for artifact in [fetched, *first]}
    assert not second[2].path.exists()


def test_what_is_in_use_stays(store: Store) -> None:
    shelf = Shelf(store)
    loose = shelf.obtain("calibrate", 1)
    user = Store(store.root)
    assert user.find(loose.manifest.key) == loose
    assert find_garbage(store) == ()
    user.close()
    garbage = find_garbage(store)
    assert [item.name for item in garbage] == [loose.name]
    user.find(loose.manifest.key)  # between looking and collecting
    assert collect(store, garbage) == ()
    assert loose.path.is_dir()
    user.close()


def test_what_is_being_made_stays_and_what_was_left_goes(store: Store, builder: Start) -> None:
    making = builder("a", "stall")
    assert making.stdout is not None
    making.stdout.readline()
    assert find_garbage(store) == ()
    making.kill()
    making.wait()
    (left,) = find_garbage(store)
    assert left.path.parent == store.work
    assert left.bytes == 1000
    assert left.reason == "left by a builder that was killed"
    assert collect(store, [left]) == (left,)
    assert list(store.work.iterdir()) == []


def test_unreadable_artifacts_go(store: Store) -> None:
    artifact = Shelf(store).obtain("package", 1)
    (artifact.path / "manifest.json").unlink()
    (garbage,) = find_garbage(store)
    assert "cannot be read" in garbage.reason
    assert collect(store, [garbage]) == (garbage,)
    assert not artifact.path.exists()


def test_a_removal_that_was_killed_is_finished(store: Store) -> None:
    artifact = Shelf(store).obtain("calibrate", 1)
    os.rename(artifact.path, store.work / f"{artifact.name}.removed")
    (garbage,) = find_garbage(store)
    assert garbage.reason == "removal was interrupted"
    assert collect(store, [garbage]) == (garbage,)
    assert list(store.work.iterdir()) == []


def test_a_removed_artifact_can_be_made_again(store: Store) -> None:
    shelf = Shelf(store)
    first = shelf.obtain("calibrate", 1)
    collect(store, find_garbage(store))
    again = shelf.obtain("calibrate", 1)
    assert again.path == first.path
    assert again.path.is_dir()
