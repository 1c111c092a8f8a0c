"""Checkpoints of a hub that are too large for the disk, or not what they should be."""

from __future__ import annotations

import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.fetching import REPO, SHARDS, Asked, get, held, refused
from tests.support.hub import CONFIG, LoopbackHub, index, sharded, weights, whole


def test_too_small_a_disk_is_found_before_the_weights(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, sharded())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    message = refused(into)
    assert "hf:org/name: 8.1 KiB are to be downloaded" in message
    assert "has 4.0 KiB free; make room (pipeline store gc, with the same --store)" in message
    assert not hub.fetched() & set(SHARDS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small filesystem can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_too_small(hub: LoopbackHub, small_disk: Path) -> None:
    hub.add(REPO, sharded(rows=20_000))
    assert "2.4 MiB are to be downloaded" in refused(small_disk)
    assert not hub.fetched() & set(SHARDS)


def test_pickled_weights_are_refused(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, {"config.json": CONFIG, "pytorch_model.bin": b"pickle"})
    message = refused(into)
    assert "has only pickled weights (pytorch_model.bin), which can run code when they are read" in message
    assert "set allow_pickle: true beside its source" in message
    assert hub.fetched() == set()


def test_safetensors_go_before_pickles(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole() | {"pytorch_model.bin": b"pickle"})
    get(into, Asked(allow_pickle=True))
    assert held(into) == whole()


class Mischief:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path(__file__).with_name("mischief"),))  # type: ignore[return-value]


def test_code_in_pickled_weights_does_not_run(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, {"config.json": CONFIG, "pytorch_model.bin": pickle.dumps({"a": Mischief()}, 2)})
    assert "pytorch_model.bin is not a file of plain tensors" in refused(into, Asked(allow_pickle=True))
    assert not Path(__file__).with_name("mischief").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{\n", ":2: is not JSON: Expecting property name"),
        (b"[]", ": is not an object, but a list"),
        (b"", ":1: is not JSON: Expecting value"),
        (b"[" * 9999, ": is nested too deeply"),
        (b'{"a": "\xff"}', ":1: is not UTF-8: byte 0xff"),
    ],
)
def test_a_damaged_configuration(hub: LoopbackHub, into: Path, text: bytes, reason: str) -> None:
    hub.add(REPO, whole() | {"config.json": text})
    assert f"hf:org/name: config.json{reason}" in refused(into)


def test_weights_whose_header_does_not_add_up(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole() | {"model.safetensors": weights("a") + b"more"})
    assert "hf:org/name: model.safetensors is" in refused(into)


def test_an_index_that_names_what_is_not_there(hub: LoopbackHub, into: Path) -> None:
    files = sharded()
    del files[SHARDS[1]]
    hub.add(REPO, files)
    message = refused(into)
    assert message == f"hf:org/name: model.safetensors.index.json names files that are not there: {SHARDS[1]}"


def test_an_index_that_lies_about_its_files(hub: LoopbackHub, into: Path) -> None:
    hub.add(
        REPO,
        sharded() | {"model.safetensors.index.json": index({"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]})},
    )
    assert "names tensors that its files do not hold: c" in refused(into)
