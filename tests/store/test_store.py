"""Making, finding, damaging."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import StageError, StoreError, UserError
from pipeline.store import ArtifactKey, Manifest, Store, files, verify

KEY = ArtifactKey("fetch", {"repo": "org/name", "ratio": 0.5}, tools={"torch": "2.13.0"})


def make(directory: Path) -> dict[str, object]:
    (directory / "config.json").write_text("{}")
    (directory / "folder" / "empty").mkdir(parents=True)
    (directory / "folder" / "weights.bin").write_bytes(bytes(range(256)) * 16)
    return {"parameters": 1000, "shape": (2, 3)}


def forbidden(directory: Path) -> dict[str, object]:
    raise AssertionError(f"made again in {directory}")


def test_obtain_makes_once_then_finds(store: Store) -> None:
    assert store.find(KEY) is None
    made = store.obtain(KEY, make, recipe="tiny")
    again = store.obtain(KEY, forbidden, recipe="other")
    assert again == made == store.find(KEY)
    assert made.path == store.root / "artifacts" / KEY.name
    assert made.digest == KEY.digest
    assert (made.path / "folder" / "empty").is_dir()
    assert list(store.work.iterdir()) == []


def test_the_manifest_says_what_it_was_made_from(store: Store) -> None:
    made = store.obtain(KEY, make, recipe="tiny")
    raw = json.loads((made.path / "manifest.json").read_text())
    assert next(iter(raw)) == "schema"
    assert raw["schema"] == 1
    assert (raw["stage"], raw["name"], raw["digest"], raw["recipe"]) == (
        "fetch",
        KEY.name,
        KEY.digest,
        "tiny",
    )
    assert raw["settings"] == {"repo": "org/name", "ratio": 0.5}
    assert raw["tools"] == {"torch": "2.13.0"}
    assert raw["facts"] == {"parameters": 1000, "shape": [2, 3]}
    assert set(raw["files"]) == {"config.json", "folder/weights.bin"}
    assert raw["files"]["config.json"] == {
        "bytes": 2,
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }
    assert raw["total_bytes"] == 4098
    assert set(raw["provenance"]) == {"created", "duration_s", "host", "pipeline"}
    assert Manifest.load(made.path) == made.manifest
    assert made.manifest.key == KEY


def test_the_twin_tells_a_reader_the_same(store: Store) -> None:
    text = (store.obtain(KEY, make, recipe="tiny").path / "manifest.txt").read_text()
    for part in (
        KEY.name,
        KEY.digest,
        "tiny",
        "4.0 KiB in 2 files",
        "ratio: 0.5",
        "shape: [2, 3]",
        "folder/weights.bin",
    ):
        assert part in text


def test_artifacts_are_read_only(store: Store) -> None:
    made = store.obtain(KEY, make, recipe="tiny")
    for name, info in files.walk(made.path):
        assert not info.st_mode & 0o222, name
        assert info.st_mode & stat.S_IRUSR


def test_a_make_that_raises_leaves_nothing(store: Store) -> None:
    def fail(directory: Path) -> dict[str, object]:
        make(directory)
        (directory / "folder" / "weights.bin").chmod(0o400)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.obtain(KEY, fail, recipe="tiny")
    assert list(store.work.iterdir()) == []
    assert store.find(KEY) is None
    store.obtain(KEY, make, recipe="tiny")


def test_a_resumable_make_that_raises_keeps_its_part(store: Store) -> None:
    key = ArtifactKey("fetch", {"repo": "org/name"}, resumable=True)

    def broken(directory: Path) -> dict[str, object]:
        assert list(directory.iterdir()) == []
        (directory / "part").write_text("1")
        raise ConnectionError

    def rest(directory: Path) -> dict[str, object]:
        assert (directory / "part").read_text() == "1"
        return {}

    with pytest.raises(ConnectionError):
        store.obtain(key, broken, recipe="tiny")
    store.obtain(key, rest, recipe="tiny")
    assert list(store.work.iterdir()) == []


def test_a_maker_killed_just_before_the_rename_is_taken_up(store: Store) -> None:
    key = ArtifactKey("fetch", {"repo": "org/name"}, resumable=True)
    made = store.obtain(key, make, recipe="tiny")
    store.close()
    os.rename(made.path, store.work / key.name)

    def again(directory: Path) -> dict[str, object]:
        assert {path.name for path in directory.iterdir()} == {"config.json", "folder"}
        return {}

    assert verify(store.obtain(key, again, recipe="tiny")).ok


def test_a_rename_that_fails_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def across(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", across)
    with pytest.raises(StoreError, match=r"cannot be published from .*: Invalid cross-device link"):
        store.obtain(KEY, make, recipe="tiny")


def test_strangers_in_the_store_are_left_alone(store: Store) -> None:
    made = store.obtain(KEY, make, recipe="tiny")
    (store.artifacts / ".DS_Store").write_text("")
    assert store.scan() == ((made,), {})


@pytest.mark.parametrize(
    ("facts", "leave", "message"),
    [
        ({}, lambda _: None, "left no file"),
        ({}, lambda d: (d / "manifest.json").write_text("{}"), "belongs to the store"),
        ({}, lambda d: (d / "link").symlink_to("/etc/hostname"), "link is not a plain file"),
        ({}, lambda d: (d / "link").symlink_to("/etc"), "link is not a plain file"),
        ({"loss": float("nan")}, lambda d: (d / "a").write_text(""), r"facts .* \$\.loss: nan"),
        ({"path": Path("/")}, lambda d: (d / "a").write_text(""), r"facts .* \$\.path: PosixPath"),
    ],
)
def test_what_cannot_be_an_artifact_is_refused(store: Store, facts: dict, leave, message: str) -> None:  # type: ignore[no-untyped-def, type-arg]
    def wrong(directory: Path) -> dict[str, object]:
        leave(directory)
        return facts

    with pytest.raises(StageError, match=message):
        store.obtain(KEY, wrong, recipe="tiny")
    assert list(store.work.iterdir()) == []


# damage


def edit(path: Path, text: str) -> None:
    path.chmod(0o600)
    path.write_text(text)


def test_verify_reports_missing_extra_and_changed(store: Store) -> None:
    made = store.obtain(KEY, make, recipe="tiny")
    assert verify(made).ok
    (made.path / "folder" / "__pycache__").mkdir()
    (made.path / "folder" / "__pycache__" / "model.pyc").write_text("")
    assert verify(made).ok, "Python's cache is no damage"
    edit(made.path / "config.json", "[]")
    (made.path / "folder" / "weights.bin").unlink()
    (made.path / "new").symlink_to("config.json")
    found = verify(made)
    assert (found.missing, found.extra, found.changed) == (
        ("folder/weights.bin",),
        ("new",),
        ("config.json",),
    )
    assert str(found) == "missing: folder/weights.bin; extra: new; changed: config.json"


def test_verify_sees_an_edited_manifest(store: Store) -> None:
    made = store.obtain(KEY, make, recipe="tiny")
    path = made.path / "manifest.json"
    edit(path, path.read_text().replace('"ratio": 0.5', '"ratio": 0.6'))
    assert verify(store.get(KEY.name)).changed == ("manifest.json",)


def test_a_torn_artifact_is_not_found_as_if_whole(store: Store) -> None:
    made = store.obtain(KEY, make, recipe="tiny")
    os.truncate(made.path / "folder" / "weights.bin", 10)
    with pytest.raises(
        StoreError,
        match=r"damaged\n  folder/weights.bin: has 10 bytes, and was .* 4096\n`pipeline store verify --remove",
    ):
        store.obtain(KEY, forbidden, recipe="tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged: is not JSON"),
        ("[]", "damaged: is not an object, but a list"),
        ("{}", "written in schema None"),
        ('{"schema":' * 9999, "damaged: is nested too deeply"),
        ('{"schema": 2}', "written in schema 2, this version of pipeline reads schema 1; build again"),
        ('{"schema": 1, "stage": "fetch"}', "damaged: digest: Field required"),
    ],
)
def test_a_manifest_that_cannot_be_read_says_why(store: Store, text: str, message: str) -> None:
    made = store.obtain(KEY, make, recipe="tiny")
    edit(made.path / "manifest.json", text)
    with pytest.raises(StoreError, match=f"manifest.json: {message}"):
        store.find(KEY)
    readable, damaged = store.scan()
    assert readable == ()
    assert list(damaged) == [KEY.name]


# the root


def test_the_default_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PIPELINE_STORE", raising=False)
    assert Store.default().root == tmp_path / ".cache" / "pipeline" / "store"
    monkeypatch.setenv("PIPELINE_STORE", "")
    assert Store.default().root == tmp_path / ".cache" / "pipeline" / "store"
    monkeypatch.setenv("PIPELINE_STORE", "~/elsewhere")
    assert Store.default().root == Store.at(None).root == tmp_path / "elsewhere"
    assert Store.at(Path("here")).root == Path.cwd() / "here"


def test_looking_into_a_store_makes_no_directory(store: Store) -> None:
    assert store.find(KEY) is None
    assert store.list() == ()
    assert not store.root.exists()


def test_a_root_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written: Not a directory; set PIPELINE_STORE"):
        Store(tmp_path / "file" / "store").obtain(KEY, forbidden, recipe="tiny")


def test_a_published_artifact_is_found_where_nothing_can_be_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = store.obtain(KEY, make, recipe="tiny")
    store.close()

    def denied(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pipeline.store.lock.shared", denied)
    assert Store(store.root).find(KEY) == made


def test_get_takes_names_digests_and_their_beginnings(store: Store) -> None:
    artifact = store.obtain(KEY, make, recipe="tiny")
    other = store.obtain(ArtifactKey("build", {"a": 1}), make, recipe="tiny")
    assert (
        store.get(artifact.name)
        == store.get(artifact.digest)
        == store.get("fetch")
        == store.get(artifact.digest[:8])
        == artifact
    )
    assert store.get("build-") == other
    for name in ("", "nothing"):
        with pytest.raises(UserError, match="no artifact"):
            store.get(name)
    third = store.obtain(ArtifactKey("build", {"a": 2}), make, recipe="tiny")
    with pytest.raises(UserError, match="'build' is short for 2 artifacts") as caught:
        store.get("build")
    assert other.name in str(caught.value)
    assert third.name in str(caught.value)


def test_list_begins_with_what_was_used_last(store: Store) -> None:
    keys = [ArtifactKey("build", {"a": number}) for number in range(3)]
    for number, key in enumerate(keys):
        os.utime(store.obtain(key, make, recipe="tiny").path, ns=(number, number))
    store.obtain(keys[0], forbidden, recipe="tiny")
    assert [artifact.digest for artifact in store.list()] == [keys[0].digest, keys[2].digest, keys[1].digest]
    newest = store.newest("build", "tiny")
    assert newest is not None
    assert newest.digest == keys[0].digest
    assert store.newest("build", "other") is None


# a full disk


def test_too_little_space_is_said_before_anything_is_made(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1024))
    with pytest.raises(StoreError, match=r"needs 1\.0 GiB, .* has 1\.0 KiB free; make room"):
        store.obtain(KEY, forbidden, recipe="tiny", needs_bytes=1 << 30)
    assert list(store.work.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_is_told_from_other_errors(store: Store, error: Exception) -> None:
    def fill(directory: Path) -> dict[str, object]:
        (directory / "part").write_bytes(bytes(2048))
        raise error

    with pytest.raises(
        StoreError, match=r"no space left in .*: 2\.0 KiB were written, .* are free; make room"
    ):
        store.obtain(KEY, fill, recipe="tiny")
    assert list(store.work.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no small filesystem can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    store = Store(small_disk / "store")

    def fill(directory: Path) -> dict[str, object]:
        (directory / "large").write_bytes(bytes(2 << 20))
        return {}

    with pytest.raises(StoreError, match="no space left in"):
        store.obtain(KEY, fill, recipe="tiny")
    assert list(store.work.iterdir()) == []
    assert store.obtain(KEY, make, recipe="tiny").path.is_dir(), "the space is free again"
    store.close()


def test_link_or_copy(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = store.obtain(KEY, make, recipe="tiny").path / "folder" / "weights.bin"
    files.link_or_copy(source, tmp_path / "linked")
    assert (tmp_path / "linked").stat().st_ino == source.stat().st_ino

    def no_links(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    files.link_or_copy(source, tmp_path / "copied")
    assert (tmp_path / "copied").read_bytes() == source.read_bytes()
    assert (tmp_path / "copied").stat().st_ino != source.stat().st_ino
