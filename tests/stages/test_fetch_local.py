"""Fetching from a local folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import InvalidInput, SourceError
from pipeline.models.folder import CheckpointFolder
from pipeline.progress import Silent
from pipeline.reading import UnreadableFile
from pipeline.recipe import LocalSource
from pipeline.sources import LocalCheckpoint, resolve_checkpoint
from pipeline.stages.fetch import fetch
from pipeline.store import Artifact, ArtifactKey, Store, files
from tests.support.hashed import HashedFiles
from tests.support.hub import CONFIG, index, sharded, weights, whole


@dataclass(frozen=True)
class Asked:
    source: LocalSource
    revision: str | None = None
    allow_pickle: bool = False


def folder(path: Path, content: Mapping[str, bytes]) -> Path:
    path.mkdir()
    for name, value in content.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(value)
    return path


def settle(path: Path, name: str = "model.safetensors") -> LocalCheckpoint:
    resolved = resolve_checkpoint(Asked(LocalSource(path)))
    assert isinstance(resolved, LocalCheckpoint)
    assert name in resolved.files
    return resolved


def held(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir()}


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return folder(tmp_path / "into", {})


def test_identity_is_the_content_and_not_the_place(tmp_path: Path) -> None:
    first = settle(folder(tmp_path / "one", whole()))
    other = settle(folder(tmp_path / "other", whole() | {"README.md": b"#", "train.py": b"", "old.bin": b""}))
    assert first.identity == other.identity
    assert str(tmp_path) not in json.dumps(first.identity)


@pytest.mark.parametrize("name", sorted(whole()))
def test_every_file_that_is_taken_counts(tmp_path: Path, name: str) -> None:
    first = settle(folder(tmp_path / "one", whole()))
    changed = settle(folder(tmp_path / "changed", whole() | {name: whole()[name] + b" "}))
    assert first.identity != changed.identity


def test_a_renamed_file_counts(tmp_path: Path) -> None:
    first = settle(folder(tmp_path / "one", whole() | {"vocab.json": b"{}"}))
    other = settle(folder(tmp_path / "other", whole() | {"added_tokens.json": b"{}"}))
    assert first.identity != other.identity


@pytest.mark.parametrize("make", [whole, sharded])
def test_files_are_copied(tmp_path: Path, into: Path, make) -> None:  # type: ignore[no-untyped-def]
    source = folder(tmp_path / "source", make() | {"README.md": b"#", "consolidated.safetensors": b"other"})
    (into / "leftover").write_bytes(b"of a killed fetch")
    facts = fetch(resolve_checkpoint(Asked(LocalSource(source))), into, progress=Silent())
    assert held(into) == make()
    assert (facts["source"], facts["tensors"]) == (f"local:{source}", 2)
    for name in make():
        assert (into / name).stat().st_ino != (source / name).stat().st_ino


def test_the_copy_stays_as_it_was(tmp_path: Path, into: Path) -> None:
    source = folder(tmp_path / "source", whole())
    fetch(settle(source), into, progress=Silent())
    with (source / "model.safetensors").open("r+b") as file:
        file.write(b"edited in place")
    assert held(into) == whole()


def hub_snapshot(cache: Path) -> Path:
    """A checkpoint in the cache of huggingface_hub: names that are links to blobs."""
    blobs, snapshot = cache / "models--org--name" / "blobs", cache / "models--org--name" / "snapshots" / "abc"
    for place in (blobs, snapshot):
        place.mkdir(parents=True)
    for number, (name, content) in enumerate(whole().items()):
        (blobs / str(number)).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.mark.parametrize("layout", ["hub", "link to a hub's snapshot", "folder"])
def test_links_are_followed_within_the_folder_and_to_the_blobs_of_a_hub(
    tmp_path: Path, into: Path, layout: str
) -> None:
    source = tmp_path / "source"
    if layout == "folder":
        folder(source, {f"files/{name}": content for name, content in whole().items()})
        for name in whole():
            (source / name).symlink_to(f"files/{name}")
    else:
        source = hub_snapshot(tmp_path / "cache")
        if layout != "hub":
            (tmp_path / "link").symlink_to(source)
            source = tmp_path / "link"
    fetch(settle(source), into, progress=Silent())
    assert held(into) == whole()
    assert not any(path.is_symlink() for path in into.iterdir())


def test_what_leads_out_or_is_no_file_is_refused_all_at_once(tmp_path: Path) -> None:
    """Opening one of these would hang, or bring a file of the system into the store."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}")
    source = folder(tmp_path / "source", whole())
    hub = hub_snapshot(tmp_path / "cache")
    for place in (source, hub):
        for name in ("tokenizer.json", "config.json", "model.safetensors"):
            (place / name).unlink()
        (place / "tokenizer.json").symlink_to(secret)
        os.mkfifo(place / "config.json")
        (place / "model.safetensors").symlink_to("/dev/zero")
        (place / "vocab.json").symlink_to("nothing")
        (place / "notes.txt").symlink_to(secret)
        with pytest.raises(InvalidInput) as caught:
            resolve_checkpoint(Asked(LocalSource(place)))
        assert str(caught.value).startswith(f"local:{place}: 4 faults")
        assert "config.json: is a named pipe, not a regular file" in str(caught.value)
        assert f"tokenizer.json: is a link to {secret}, outside of the folder (copy" in str(caught.value)
        assert "model.safetensors: is a link to /dev/zero, outside" in str(caught.value)
        assert "vocab.json: cannot be read: No such file" in str(caught.value)
        assert "notes.txt" not in str(caught.value), "nobody reads it"


@pytest.mark.parametrize("swapped", ["files", "files/real.json"])
def test_what_becomes_a_link_after_it_was_judged_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    source = folder(tmp_path / "source", {"files/real.json": b"{}"})
    (source / "config.json").symlink_to("files/real.json")
    elsewhere = folder(tmp_path / "elsewhere", {"files/real.json": b"secret"})
    checkpoint = CheckpointFolder(source)
    assert checkpoint.read("config.json") == b"{}"

    judged = checkpoint._way("config.json")
    monkeypatch.setattr(CheckpointFolder, "_way", lambda *_: judged)
    (source / swapped).rename(source / "before")
    (source / swapped).symlink_to(elsewhere / swapped)
    with pytest.raises(UnreadableFile, match=r"config\.json"):
        checkpoint.read("config.json")


def test_the_store_keeps_to_itself_what_others_may_not_read(tmp_path: Path) -> None:
    """So it stays with all that is made from it, whatever the umask allows."""
    store = Store(tmp_path / "store")

    def obtain(source: Path) -> tuple[Artifact, Artifact]:
        resolved = settle(source)
        key = ArtifactKey("fetch", settings=resolved.identity, resumable=True)
        fetched = store.obtain(key, lambda into: fetch(resolved, into, progress=Silent()), recipe="r")
        derived = ArtifactKey("build", inputs={"checkpoint": fetched.digest})
        return fetched, store.obtain(derived, lambda into: {"n": (into / "a").write_bytes(b"a")}, recipe="r")

    source = folder(tmp_path / "source", whole())
    open_to_all = obtain(source)
    (source / "model.safetensors").write_bytes(weights("private"))
    (source / "model.safetensors").chmod(0o640)
    private = obtain(source)
    umask = os.umask(0)
    os.umask(umask)
    for artifact in open_to_all:
        assert stat.S_IMODE(artifact.path.stat().st_mode) == 0o777 & ~umask
    for artifact in private:
        assert stat.S_IMODE(artifact.path.stat().st_mode) == 0o700 & ~umask
    assert stat.S_IMODE((private[0].path / "model.safetensors").stat().st_mode) == 0o400 & ~umask
    assert stat.S_IMODE((private[0].path / "config.json").stat().st_mode) == 0o444 & ~umask


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, into: Path) -> None:
    source = folder(tmp_path / "source", whole())
    resolved = settle(source)
    (source / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(
        SourceError, match=r"tokenizer\.json was changed while it was read; run the command again"
    ):
        fetch(resolved, into, progress=Silent())
    (source / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"tokenizer\.json: cannot be read: No such file"):
        fetch(resolved, into, progress=Silent())


def test_too_small_a_disk(tmp_path: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = settle(folder(tmp_path / "source", whole()))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    monkeypatch.setattr(files, "clone", lambda *_: False)
    with pytest.raises(SourceError, match=r"needs 8\.3 KiB, .* has 4\.0 KiB free"):
        fetch(resolved, into, progress=Silent())


def test_blocks_are_shared_where_the_filesystem_can(
    tmp_path: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filesystem that clones needs no space, and copies nothing."""

    def ioctl(target: int, _request: int, source: int) -> int:
        os.write(target, os.read(source, 1 << 20))
        return 0

    monkeypatch.setattr("pipeline.store.files.fcntl.ioctl", ioctl)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    fetch(settle(folder(tmp_path / "source", whole())), into, progress=Silent())
    assert held(into) == whole()


def test_a_failing_disk_is_not_taken_for_a_filesystem_that_cannot_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ioctl(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("pipeline.store.files.fcntl.ioctl", ioctl)
    (tmp_path / "a").write_bytes(b"a")
    with (tmp_path / "a").open("rb") as source, pytest.raises(OSError, match="Input/output error"):
        files.clone(source, tmp_path / "b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model.safetensors": b""}, "has no config.json: it is not a checkpoint"),
        (
            {"config.json": CONFIG},
            "has no weights: neither model.safetensors nor model.safetensors.index.json",
        ),
        ({"config.json": CONFIG, "pytorch_model.bin": b""}, "has only pickled weights"),
        ({"config.json": CONFIG, "m.Q4_K_M.gguf": b""}, "has only GGUF files"),
        (
            {"config.json": CONFIG, "consolidated.safetensors": b""},
            "consolidated.safetensors is not in the layout",
        ),
        ({"config.json": CONFIG, "training.pt": b""}, "training.pt is not in the layout"),
        ({"config.json": CONFIG, "model.safetensors.index.json": b"{"}, "is damaged: it has no map"),
        ({"config.json": CONFIG, "model.safetensors.index.json": b"[]"}, "is damaged: it has no map"),
        (
            {"config.json": CONFIG, "model.safetensors.index.json": index({})},
            "files that are not there: no file at all",
        ),
        (
            {"config.json": CONFIG, "model.safetensors.index.json": index({"a": "b.safetensors"})},
            "not there: b.safe",
        ),
        (
            {"config.json": CONFIG, "model.safetensors.index.json": index({"a": "../b.safetensors"})},
            "not a .safetensors",
        ),
        (
            {"config.json": CONFIG, "model.safetensors.index.json": index({"a": "b.py"})},
            "which is not a .safetensors",
        ),
        ({"config.json": CONFIG, "model.safetensors.index.json": index({"a": 1})}, "names 1, which is not"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: dict[str, bytes], message: str) -> None:
    source = folder(tmp_path / "source", content)
    with pytest.raises(SourceError) as caught:
        settle(source)
    assert str(caught.value).startswith(f"local:{source}")
    assert message in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no such folder"):
        settle(tmp_path / "nothing")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match="is a file, not a folder"):
        settle(tmp_path / "file")


def test_a_chat_template_that_takes_more_than_its_limits_is_refused(tmp_path: Path, into: Path) -> None:
    template = b"{% if tools %}{{ 'x' * 10**10 }}{% endif %}"
    resolved = settle(folder(tmp_path / "source", whole() | {"chat_template.jinja": template}))
    with pytest.raises(
        SourceError, match=r"^local:.*: the chat template takes more than 512 MiB .* a tool conv"
    ):
        fetch(resolved, into, progress=Silent())


def test_damaged_weights_are_found(tmp_path: Path, into: Path) -> None:
    source = folder(tmp_path / "source", whole() | {"model.safetensors": weights("a")[:-1]})
    with pytest.raises(SourceError, match=r"model\.safetensors is"):
        fetch(settle(source), into, progress=Silent())


# pickled weights


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("names", [("pytorch_model.bin",), ("pytorch_model-1.bin", "pytorch_model-2.bin")])
def test_allowed_pickles_become_safetensors(tmp_path: Path, into: Path, names: tuple[str, ...]) -> None:
    import torch
    from safetensors.numpy import load_file

    source = folder(tmp_path / "source", {"config.json": CONFIG})
    shared = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    for number, name in enumerate(names):
        torch.save(
            {f"embed.{number}": shared, f"head.{number}": shared, f"t.{number}": shared.t()}, source / name
        )
    if len(names) > 1:
        placed = {
            f"{part}.{number}": name for number, name in enumerate(names) for part in ("embed", "head", "t")
        }
        (source / "pytorch_model.bin.index.json").write_bytes(index(placed))
    facts = fetch(resolve_checkpoint(Asked(LocalSource(source), allow_pickle=True)), into, progress=Silent())
    assert facts["pickled"] is True
    assert facts["tensors"] == 3 * len(names)
    assert not [path for path in into.iterdir() if "bin" in path.name]
    loaded = {name: value for path in into.glob("*.safetensors") for name, value in load_file(path).items()}
    assert (loaded["head.0"] == shared.numpy()).all()
    assert (loaded["t.0"] == shared.numpy().T).all()
    assert (into / "model.safetensors.index.json").exists() is (len(names) > 1)


# remembered hashes


def test_hashes_are_remembered_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.store.hashes._SETTLED_S", -1.0)
    counted = HashedFiles(monkeypatch)
    store = Store(tmp_path / "store")
    source = folder(tmp_path / "source", whole())
    asked = Asked(LocalSource(source))
    first = resolve_checkpoint(asked, store=store)
    assert sorted(counted.names) == sorted(whole())
    counted.names.clear()
    assert resolve_checkpoint(asked, store=store).identity == first.identity
    assert counted.names == []

    path = source / "model.safetensors"
    before = path.stat()
    path.write_bytes(bytes(reversed(path.read_bytes())))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert resolve_checkpoint(asked, store=store).identity != first.identity, (
        "same size, same time, other bytes"
    )
    assert counted.names == ["model.safetensors"]
