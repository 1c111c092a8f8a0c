"""From what a recipe names to files and rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UserError
from pipeline.recipe.source import LocalSource, NamedDataset
from pipeline.stages.dataset.definition import Definition, read_definition
from pipeline.stages.dataset.hub import download
from pipeline.stages.dataset.rows import Row, read_rows
from pipeline.store import Json

TRAIN, HELDOUT = "train", "heldout"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a data set on this machine."""

    name: str
    license: str
    column: str | None  # None: messages, or whatever each line holds
    any_kind: bool
    paths: dict[str, Path]  # split -> file; without "heldout" it is taken from the rest of "train"

    def rows(self, split: str) -> list[Row]:
        return read_rows(self.paths[split], self.column, self.any_kind)

    def digests(self) -> dict[str, Json]:
        """Split -> SHA-256 (hex) of its file."""
        return {split: sha256_of(path) for split, path in sorted(self.paths.items())}


def resolve(dataset: NamedDataset | LocalSource) -> Files:
    """The files of the set, downloaded if they lie on the hub."""
    if isinstance(dataset, LocalSource):
        _must_exist(dataset.path, f"dataset local:{dataset.path}")
        return Files(dataset.path.name, "not stated", None, True, {TRAIN: dataset.path})
    definition = read_definition(dataset.name)
    names = {TRAIN: definition.train, HELDOUT: definition.heldout}
    paths = {split: _file(definition, name) for split, name in names.items() if name}
    return Files(definition.name, definition.license, definition.column, False, paths)


def identity(dataset: NamedDataset | LocalSource) -> dict[str, Json]:
    """What a plan depends on: the name, and digests of local files or the commit on the hub. Downloads
    nothing.
    """
    if isinstance(dataset, NamedDataset):
        definition = read_definition(dataset.name)
        if definition.hub is not None:
            splits: dict[str, Json] = {TRAIN: definition.train, HELDOUT: definition.heldout}
            return {
                "dataset": definition.name,
                "repo": definition.hub.repo,
                "revision": definition.hub.revision,
                "column": definition.column,
                "splits": splits,
            }
    files = resolve(dataset)
    return {"dataset": files.name, "column": files.column, "files": files.digests()}


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _file(definition: Definition, name: str) -> Path:
    if definition.hub is not None:
        return download(definition.hub, name)
    path = definition.path.parent / name
    _must_exist(path, f"calibration set {definition.name} ({definition.path})")
    return path


def _must_exist(path: Path, what: str) -> None:
    if not path.is_file():
        raise UserError(f"{what}: there is no file {path}")
