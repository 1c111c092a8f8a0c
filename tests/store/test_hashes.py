"""Hashes that are remembered, and artifacts that are held against their manifests before they are used."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from pipeline.errors import DamagedArtifact
from pipeline.store import Artifact, ArtifactKey, FileHashes, Store
from pipeline.store.artifact import SMALL_BYTES
from pipeline.store.hashes import MAX_AGE_S
from tests.support.hashed import HashedFiles

KEY = ArtifactKey("build", {"runtime": "cpu"})
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def hashed(cache: FileHashes, path: Path) -> str:
    with path.open("rb") as stream:
        return cache.sha256(stream, path)


def test_what_was_written_just_now_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = HashedFiles(monkeypatch)
    (tmp_path / "new").write_bytes(b"1")
    for _ in range(2):
        cache = FileHashes(tmp_path / "hashes.json")
        hashed(cache, tmp_path / "new")
        cache.save()
    assert counted.names == ["new", "new"]


def test_a_hash_is_believed_for_a_month_and_kept_beside_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.store.hashes._SETTLED_S", -1.0)
    counted, now = HashedFiles(monkeypatch), time.time()
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"")
    first, second = (FileHashes(tmp_path / "hashes.json") for _ in range(2))
    assert hashed(first, tmp_path / "a") == hashed(second, tmp_path / "b") == EMPTY
    first.save()
    second.save()
    for age_s, read in ((MAX_AGE_S - 9, []), (MAX_AGE_S + 9, ["a", "b"]), (-9, ["a", "b"])):
        counted.names.clear()
        monkeypatch.setattr("pipeline.store.hashes.time.time", lambda age_s=age_s: now + age_s)
        cache = FileHashes(tmp_path / "hashes.json")
        assert [hashed(cache, tmp_path / name) for name in ("a", "b")] == [EMPTY, EMPTY]
        assert counted.names == read


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 1, "files": {}}', '{"schema": 2, "files": {"/a": [1]}}', "[" * 9999]
)
def test_a_damaged_memory_is_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "hashes.json").write_text(text)
    (tmp_path / "a").write_bytes(b"")
    cache = FileHashes(tmp_path / "hashes.json")
    assert hashed(cache, tmp_path / "a") == EMPTY
    cache.save()
    assert json.loads((tmp_path / "hashes.json").read_text())["schema"] == 2


def test_a_memory_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = FileHashes(tmp_path / "file" / "hashes.json")
    assert hashed(cache, tmp_path / "file") == EMPTY
    cache.save()


# artifacts


def publish(store: Store) -> Artifact:
    """A small file and one of more than a megabyte."""

    def make(into: Path) -> dict[str, object]:
        (into / "config.json").write_text("{}")
        (into / "weights.bin").write_bytes(bytes(SMALL_BYTES + 1))
        return {}

    return store.obtain(KEY, make, recipe="r")


def flip_a_bit(path: Path) -> None:
    """As a disk may: the size stays, and so does the modification time."""
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        (byte,) = file.read(1)
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    path.chmod(before.st_mode)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_weights_are_read_when_they_are_published_and_not_at_every_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.store.hashes._SETTLED_S", -1.0)
    counted = HashedFiles(monkeypatch)
    artifact = publish(Store(tmp_path))
    assert sorted(counted.names) == ["config.json", "weights.bin"]
    for _ in range(2):
        counted.names.clear()
        Store(tmp_path).check(artifact)
        assert counted.names == ["config.json"], "of another process, too"


@pytest.mark.parametrize("name", ["config.json", "weights.bin"])
def test_a_flipped_bit_is_found_before_the_artifact_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("pipeline.store.hashes._SETTLED_S", -1.0)
    artifact = publish(Store(tmp_path))
    Store(tmp_path).check(artifact)
    flip_a_bit(artifact.path / name)
    assert Store(tmp_path).find(KEY) == artifact, "sizes are right"
    with pytest.raises(DamagedArtifact) as caught:
        Store(tmp_path).check(artifact)
    published = artifact.manifest.files[name].sha256
    found = FileHashes(None)
    assert (
        f"{name}: has the SHA-256 {hashed(found, artifact.path / name)}, and was published with {published}"
        in str(caught.value)
    )
    assert f"`pipeline store verify --remove --store {tmp_path}`" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_disk_that_forgets_is_found_when_all_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing about the file shows it, so the remembered hash is believed until it is too old."""
    monkeypatch.setattr("pipeline.store.hashes._SETTLED_S", -1.0)
    store = Store(tmp_path)
    artifact = publish(store)
    monkeypatch.setattr("pipeline.store.hashes._state", lambda _: [0, 0, 0, 0, 0])
    store.check(artifact)
    flip_a_bit(artifact.path / "weights.bin")
    store.check(artifact)
    later = time.time() + MAX_AGE_S + 9
    monkeypatch.setattr("pipeline.store.hashes.time.time", lambda: later)
    with pytest.raises(DamagedArtifact, match=r"weights\.bin"):
        store.check(artifact)
