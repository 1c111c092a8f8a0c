"""`pipeline store`, as a user calls it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from pipeline.cli.store import command
from pipeline.errors import StoreError, UserError
from pipeline.store import Artifact, ArtifactKey, Store


def put(shelf: Store, stage: str, number: int, *inputs: Artifact, recipe: str = "tiny") -> Artifact:
    key = ArtifactKey(stage, {"n": number}, {f"role{i}": item.digest for i, item in enumerate(inputs)})

    def make(directory: Path) -> dict[str, int]:
        (directory / "file.bin").write_bytes(bytes(3000))
        return {"n": number}

    artifact = shelf.obtain(key, make, recipe=recipe)
    shelf.close()
    os.utime(artifact.path, ns=(number, number))
    return artifact


def run(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(command, arguments, input=answer)


def as_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_ls_of_an_empty_store(shelf: Store) -> None:
    result = run("ls")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert result.stderr == f"0 artifacts, 0 B in {shelf.root}\n"
    assert not shelf.root.exists()


def test_ls_lists_and_filters(shelf: Store) -> None:
    fetched = put(shelf, "fetch", 1)
    built = put(shelf, "build", 2, fetched, recipe="other")
    lines = run("ls").stdout.splitlines()
    assert lines[0].split() == ["ARTIFACT", "RECIPE", "SIZE", "MADE", "(UTC)"]
    assert [line.split()[:4] for line in lines[1:]] == [
        [built.name, "other", "2.9", "KiB"],
        [fetched.name, "tiny", "2.9", "KiB"],
    ]
    assert [row["name"] for row in as_json("ls", "fetch")["artifacts"]] == [fetched.name]
    (row,) = as_json("ls", "other")["artifacts"]
    assert (row["digest"], row["bytes"], row["path"]) == (built.digest, 3000, str(built.path))


def test_ls_names_what_it_cannot_read(shelf: Store) -> None:
    damaged = put(shelf, "fetch", 1)
    (damaged.path / "manifest.json").unlink()
    assert "unreadable: " in run("ls").stderr
    assert list(as_json("ls")["unreadable"]) == [damaged.name]


def test_show(shelf: Store) -> None:
    artifact = put(shelf, "fetch", 1)
    result = run("show", "fetch")
    assert result.stdout == (artifact.path / "manifest.txt").read_text()
    assert result.stderr == f"in {artifact.path}\n"
    shown = as_json("show", artifact.digest[:9])
    assert shown["path"] == str(artifact.path)
    assert shown["files"]["file.bin"]["bytes"] == 3000
    missing = run("show", "nothing")
    assert isinstance(missing.exception, UserError)
    assert "no artifact 'nothing'" in str(missing.exception)


def test_verify_exits_with_1_if_anything_is_damaged(shelf: Store) -> None:
    intact, changed_file = put(shelf, "fetch", 1), put(shelf, "fetch", 2)
    assert run("verify").exit_code == 0
    (changed_file.path / "file.bin").chmod(0o600)
    (changed_file.path / "file.bin").write_bytes(bytes(2999) + b"1")
    result = run("verify")
    assert result.exit_code == 1
    assert set(result.stdout.splitlines()) == {
        f"{intact.name}  intact",
        f"{changed_file.name}  changed: file.bin",
    }
    assert run("verify", intact.name).exit_code == 0
    assert as_json("verify", changed_file.name)["artifacts"][changed_file.name]["changed"] == ["file.bin"]


def test_verify_can_remove_what_is_damaged(shelf: Store) -> None:
    intact, in_use, unreadable = (put(shelf, "fetch", number) for number in (1, 2, 3))
    (in_use.path / "file.bin").unlink()
    (unreadable.path / "manifest.json").unlink()
    user = Store(shelf.root)
    user.use(in_use)
    result = run("verify", "--remove", in_use.name)
    assert isinstance(result.exception, StoreError)
    assert "in use by a running build or server" in str(result.exception)
    user.close()
    result = run("verify", "--remove")
    assert result.exit_code == 1
    assert f"{in_use.name}  missing: file.bin (removed)" in result.stdout
    assert [artifact.name for artifact in shelf.list()] == [intact.name]
    assert run("verify").exit_code == 0


def test_gc_asks(shelf: Store) -> None:
    loose = put(shelf, "fetch", 1)
    assert run("gc", answer="").exit_code == 1
    result = run("gc", answer="n\n")
    assert result.exit_code == 1
    assert "made for tiny, no newest package needs it" in result.stdout
    assert "Remove 1 directory, 2.9 KiB?" in result.stderr
    assert loose.path.is_dir()
    result = run("gc", answer="y\n")
    assert result.exit_code == 0
    assert "removed 1 directory, 2.9 KiB" in result.stderr
    assert not loose.path.exists()


def test_gc_as_json_removes_with_yes_alone(shelf: Store) -> None:
    fetched = put(shelf, "fetch", 1)
    package = put(shelf, "package", 2, fetched)
    loose = put(shelf, "calibrate", 3, fetched)
    assert [item["removed"] for item in as_json("gc")["garbage"]] == [False]
    assert loose.path.is_dir()
    listed = as_json("gc", "--yes")
    assert [(item["name"], item["removed"]) for item in listed["garbage"]] == [(loose.name, True)]
    assert listed["removed_bytes"] == 3000
    assert {artifact.name for artifact in shelf.list()} == {fetched.name, package.name}
    assert "0 directories, 0 B could go" in run("gc").stderr
