"""A checkpoint in a local folder: its content, and a copy of it.

The files are copied (as a reflink where the filesystem can) and never linked: the user may go on editing them, and
an artifact does not change. Symbolic links, as huggingface_hub's cache makes them, are followed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.progress import Progress
from pipeline.stages.fetch.hashes import HashCache
from pipeline.stages.fetch.resolved import LocalCheckpoint
from pipeline.stages.fetch.selection import select, shards
from pipeline.store import FileEntry, files, human_bytes


def resolve_local(
    path: Path, *, allow_pickle: bool, hashes: HashCache, progress: Progress
) -> LocalCheckpoint:
    """Choose the files of a folder and hash them. SourceError if it is not a checkpoint."""
    label = f"local:{path}"
    try:
        taken = chosen_files(path, allow_pickle=allow_pickle)
        total = sum((path / name).stat().st_size for name in taken)
        with progress.task(f"read {path.name}", total, "B") as task:
            digests = {name: hashes.sha256(path / name, task.advance) for name in taken}
    except OSError as error:
        raise SourceError(f"{label}: {error.filename}: cannot be read: {error.strerror}") from error
    hashes.save()
    sizes = {name: (path / name).stat().st_size for name in taken}
    return LocalCheckpoint(path, {name: FileEntry(bytes=sizes[name], sha256=digests[name]) for name in taken})


def chosen_files(path: Path, *, allow_pickle: bool) -> list[str]:
    """The names of the files of a folder that a build takes, sorted.

    Raises:
        SourceError: the folder is not there, or is not a checkpoint.
        OSError: it cannot be read.
    """
    label = f"local:{path}"
    if not path.is_dir():
        raise SourceError(
            f"{label}: {'is a file, not a folder' if path.exists() else 'there is no such folder'}"
        )
    names = {entry.name for entry in path.iterdir() if entry.is_file()}
    selection = select(names, allow_pickle=allow_pickle, label=label)
    weights: tuple[str, ...] = (selection.weights,)
    if selection.is_index:
        index = (path / selection.weights).read_bytes()
        weights += shards(index, names, pickled=selection.pickled, label=label)
    return sorted({*selection.companions, *weights})


def copy_local(source: LocalCheckpoint, into: Path, progress: Progress) -> None:
    """Copy the files, and check that they are what was resolved."""
    for leftover in into.iterdir():
        leftover.unlink()
    plain = []
    for name in source.files:
        try:
            if not files.clone(source.path / name, into / name):
                plain.append(name)
        except OSError as error:
            raise SourceError(f"{source.label}: {name}: cannot be read: {error.strerror}") from error
    needed = sum(source.files[name].bytes for name in plain)
    free = shutil.disk_usage(into).free
    if needed > free:
        raise SourceError(
            f"{source.label}: needs {human_bytes(needed)}, {into.parent} has {human_bytes(free)} free"
        )
    with progress.task(f"copy {source.path.name}", needed, "B") as task:
        for name in plain:
            files.copy(source.path / name, into / name, task.advance)
    for name, digest in files.sha256_all(into, list(source.files)).items():
        if digest != source.files[name].sha256:
            raise SourceError(f"{source.label}: {name} was changed while it was read; run the command again")
