"""A checkpoint in a local folder: its content, and a copy of it.

The files are copied (as a reflink where the filesystem can) and never linked: the user may go on editing them, and
an artifact does not change. Links are followed where `CheckpointFolder` allows it. What not everybody may read in the
folder, only its owner may read in the store, and so with all that is made from it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from io import BufferedReader
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.models.folder import CheckpointFolder
from pipeline.progress import Progress
from pipeline.reading import UnreadableFile
from pipeline.stages.fetch.resolved import LocalCheckpoint
from pipeline.stages.fetch.selection import select, shards
from pipeline.store import FileEntry, FileHashes, files, human_bytes


def resolve_local(
    path: Path, *, allow_pickle: bool, hashes: FileHashes, progress: Progress
) -> LocalCheckpoint:
    """Choose the files of a folder and hash them.

    Raises:
        SourceError: it is not a checkpoint. InvalidInput, UnreadableFile: files that are none, or not in the folder.
    """
    folder, taken = chosen_files(path, allow_pickle=allow_pickle)
    total = sum((path / name).stat().st_size for name in taken)
    found: dict[str, FileEntry] = {}
    with progress.task(f"read {path.name}", total, "B") as task:
        for name in taken:
            with folder.open(name) as stream:
                digest = hashes.sha256(stream, path / name, task.advance)
                found[name] = FileEntry(bytes=os.fstat(stream.fileno()).st_size, sha256=digest)
    hashes.save()
    return LocalCheckpoint(path, found)


def chosen_files(path: Path, *, allow_pickle: bool) -> tuple[CheckpointFolder, list[str]]:
    """A folder, and the names of the files of it that a build takes, sorted.

    Raises:
        SourceError: it is not there, or is not a checkpoint. InvalidInput, UnreadableFile: as `CheckpointFolder`.
    """
    label = f"local:{path}"
    if not path.is_dir():
        raise SourceError(
            f"{label}: {'is a file, not a folder' if path.exists() else 'there is no such folder'}"
        )
    folder = CheckpointFolder(path)
    selection = select(folder.names, allow_pickle=allow_pickle, label=label)
    weights: tuple[str, ...] = (selection.weights,)
    if selection.is_index:
        index = folder.read(selection.weights)
        weights += shards(index, folder.names, pickled=selection.pickled, label=label)
    return folder, sorted({*selection.companions, *weights})


def copy_local(source: LocalCheckpoint, into: Path, progress: Progress) -> None:
    """Copy the files, and check that they are what was resolved."""
    for leftover in into.iterdir():
        leftover.unlink()
    folder = CheckpointFolder(source.path)
    plain = [name for name in source.files if not _copied(folder, name, into, files.clone)]
    needed = sum(source.files[name].bytes for name in plain)
    free = shutil.disk_usage(into).free
    if needed > free:
        raise SourceError(
            f"{source.label}: needs {human_bytes(needed)}, {into.parent} has {human_bytes(free)} free"
        )
    with progress.task(f"copy {source.path.name}", needed, "B") as task:
        for name in plain:
            _copied(folder, name, into, partial(files.copy, advance=task.advance))
    for name, digest in files.sha256_all(into, list(source.files)).items():
        if digest != source.files[name].sha256:
            raise SourceError(f"{source.label}: {name} was changed while it was read; run the command again")


def _copied(
    folder: CheckpointFolder, name: str, into: Path, copy: Callable[[BufferedReader, Path], bool | None]
) -> bool | None:
    """Copy a file in one of the ways of `files`, for those who may read it where it is."""
    try:
        with folder.open(name) as stream:
            if files.is_private(stream):
                into.chmod(0o700)
            return copy(stream, into / name)
    except UnreadableFile as error:
        raise SourceError(f"local:{folder.path}: {name}: {error.fault.problem}") from error
