"""Two builders at once, and builders that are killed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.store import ArtifactKey, Store, lock, verify
from tests.support.waiting import wait_for

Start = Callable[..., "subprocess.Popen[str]"]


def slow(name: str, *, resumable: bool = False) -> ArtifactKey:
    return ArtifactKey("slow", {"name": name}, resumable=resumable)


def debris(store: Store) -> list[str]:
    return [path.name for path in store.work.iterdir()]


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_make_one_artifact_once(store: Store, builder: Start) -> None:
    first = builder("a", "stall")
    assert line(first) == "making"
    second = builder("a", "go")
    assert second.stderr is not None
    assert f"process {first.pid} on {os.uname().nodename} is making it" in second.stderr.readline()
    tell(first)
    path = line(first)
    assert line(second) == path, "the second took the first one's artifact and made nothing"
    assert second.wait(20) == 0
    assert (Path(path) / "first.bin").stat().st_size == 1000
    assert debris(store) == []


def test_different_artifacts_are_made_side_by_side(store: Store, builder: Start) -> None:
    first = builder("a", "stall")
    assert line(first) == "making"
    second = builder("b", "go")
    assert line(second) == "making"
    assert Path(line(second)).name == slow("b").name
    assert debris(store) == [slow("a").name]


def test_after_kill_9_the_next_obtain_makes_it_from_nothing(store: Store, builder: Start) -> None:
    first = builder("a", "stall")
    assert line(first) == "making"
    first.kill()
    first.wait()
    assert debris(store) == [slow("a").name], "a killed builder cannot clean up"
    assert store.find(slow("a")) is None

    second = builder("a", "go")
    assert line(second) == "making"
    path = Path(line(second))
    assert (path / "first.bin").stat().st_size == 1000, "not 2000: the leftover was removed"
    assert debris(store) == []
    assert verify(store.get(path.name)).ok


def test_after_kill_9_a_resumable_make_goes_on(store: Store, builder: Start) -> None:
    first = builder("a", "stall", "resumable")
    assert line(first) == "making"
    first.kill()
    first.wait()
    second = builder("a", "go", "resumable")
    assert line(second) == "making"
    assert (Path(line(second)) / "first.bin").stat().st_size == 2000
    assert debris(store) == []


def test_a_waiter_makes_it_when_the_first_builder_is_killed(store: Store, builder: Start) -> None:
    first = builder("a", "stall")
    assert line(first) == "making"
    second = builder("a", "go")
    assert second.stderr is not None
    second.stderr.readline()  # it waits
    first.kill()
    assert line(second) == "making"
    assert Path(line(second)).is_dir()
    assert debris(store) == []


def test_threads_make_it_once(store: Store) -> None:
    calls = []
    inside = threading.Event()

    def make(directory: Path) -> dict[str, int]:
        calls.append(directory)
        inside.set()
        (directory / "a").write_text("a")
        return {}

    found = []
    threads = [
        threading.Thread(target=lambda: found.append(store.obtain(slow("t"), make, recipe="r")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert {artifact.path for artifact in found} == {store.artifacts / slow("t").name}


def test_what_is_in_use_cannot_be_locked_until_its_user_is_gone(store: Store, builder: Start) -> None:
    user = builder("a", "stall")
    assert line(user) == "making"
    tell(user)
    path = Path(line(user))
    file = store.locks / f"{path.name}.lock"
    assert lock.exclusive(file) is None
    user.kill()
    user.wait()
    held = lock.exclusive(file)
    assert held is not None
    held.release()


def test_a_removed_lock_file_is_not_locked_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    first = lock.exclusive(path)
    assert first is not None
    first.release(unlink=True)
    second = lock.exclusive(path)
    assert second is not None
    assert lock.exclusive(path) is None
    second.release()


def test_a_lock_without_support_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, mode: int) -> None:  # noqa: ARG001
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreError, match=r"this filesystem has no locks.*set PIPELINE_STORE"):
        Store(tmp_path).obtain(slow("a"), lambda _: {}, recipe="r")


def test_a_child_that_inherits_the_lock_keeps_the_artifact(store: Store) -> None:
    def make(directory: Path) -> dict[str, int]:
        (directory / "a").write_text("a")
        return {}

    artifact = store.obtain(slow("a"), make, recipe="r")
    child = subprocess.Popen(["sleep", "60"], pass_fds=store.descriptors())
    try:
        store.close()
        assert lock.exclusive(store.locks / f"{artifact.name}.lock") is None
    finally:
        child.kill()
        child.wait()

    def released() -> bool:
        held = lock.exclusive(store.locks / f"{artifact.name}.lock")
        if held is not None:
            held.release()
        return held is not None

    wait_for(released, "release")
