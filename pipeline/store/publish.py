"""From a work directory to an artifact: list, hash, describe, put on the disk, rename."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.errors import StageError, StoreError
from pipeline.progress import Progress
from pipeline.store import files, manifest, signature
from pipeline.store.artifact import Artifact
from pipeline.store.hashes import FileHashes
from pipeline.store.key import ArtifactKey, Json, canonical
from pipeline.store.manifest import FileEntry, Manifest, Provenance

# Why a file cannot become longer, and what helps.
_ROOM = "make room (`{gc}`) or set PIPELINE_STORE to a larger disk"
_NO_ROOM = {
    errno.ENOSPC: ("no space left", _ROOM),
    errno.EDQUOT: ("the disk quota is used up", _ROOM),
    errno.EFBIG: ("no file may become so large", "raise the limit of this process (ulimit -f)"),
}
_WORDS = {"no space left on device": errno.ENOSPC, "file too large": errno.EFBIG}


def publish(
    work: Path,
    target: Path,
    key: ArtifactKey,
    recipe: str,
    facts: Mapping[str, Json],
    duration_s: float,
    progress: Progress,
    hashes: FileHashes,
) -> Artifact:
    """Turn a work directory into an artifact, all or nothing.

    Args:
        work: folder that a stage left; renamed to `target`.
        target: the artifact's directory, on the same filesystem.
        facts: findings and measurements of the stage, for the manifest.
        duration_s: how long making it took, without hashing and publishing.
        hashes: remembers the hashes, so that a start soon after need not read the files again.

    Raises:
        StageError: there is no file, one is not plain, or facts are no JSON. StoreError: the rename fails.
    """
    files.make_read_only(work)
    entries = _entries(work, target, key, progress, hashes)
    record = Manifest(
        stage=key.stage,
        digest=key.digest,
        name=key.name,
        recipe=recipe,
        settings=_json(key.settings),
        inputs=dict(key.inputs),
        tools=dict(key.tools),
        facts=_facts(key, facts),
        provenance=Provenance(
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            duration_s=round(duration_s, 3),
            host=socket.gethostname(),
            pipeline=__version__,
        ),
        files=entries,
        total_bytes=sum(entry.bytes for entry in entries.values()),
    )
    record.write(work)
    files.make_read_only(work)
    files.settle(work)
    try:
        os.rename(work, target)
    except OSError as error:
        raise StoreError(f"{target}: cannot be published from {work}: {error.strerror}") from error
    files.fsync(target.parent)
    files.fsync(work.parent)
    hashes.save()
    return Artifact(target, record)


def no_room(error: BaseException) -> tuple[str, str] | None:
    """Tell an error that came from a full disk, a quota or a limit on file sizes; C++ and Rust say so in words.

    Returns:
        Why nothing more could be written, and what helps (which may hold `{gc}`, the place of a command); or None.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
            return _NO_ROOM[cause.errno]
        if not isinstance(cause, OSError):
            for text, number in _WORDS.items():
                if text in str(cause).lower():
                    return _NO_ROOM[number]
        cause = cause.__cause__ or cause.__context__
    return None


def _entries(
    work: Path, target: Path, key: ArtifactKey, progress: Progress, hashes: FileHashes
) -> dict[str, FileEntry]:
    infos = dict(files.walk(work))
    if not infos:
        raise StageError(f"{key.name}: the stage left no file")
    for name, info in infos.items():
        if not files.is_plain(info):
            raise StageError(f"{key.name}: {name} is not a plain file; an artifact holds its own bytes")
        if name in (manifest.FILE, manifest.TWIN, signature.FILE):
            raise StageError(f"{key.name}: the stage wrote {name}, which belongs to the store")
    with progress.task(f"hash {key.name}", sum(info.st_size for info in infos.values()), "B") as task:

        def sha256(stream: BufferedReader, name: str) -> str:
            # Under the name that it will have, so that a start soon after need not read it again.
            return hashes.sha256(stream, target / name, task.advance, again=True)

        digests = files.sha256_all(work, list(infos), of=sha256)
    return {name: FileEntry(bytes=info.st_size, sha256=digests[name]) for name, info in infos.items()}


def _facts(key: ArtifactKey, facts: Mapping[str, Json]) -> dict[str, Any]:
    try:
        canonical(facts)
        return _json(facts)
    except ValueError as error:
        raise StageError(f"{key.name}: the facts of the stage cannot be written: {error}") from error


def _json(values: Mapping[str, Json]) -> dict[str, Any]:
    """Through JSON and back: tuples become lists, mappings dicts, and nothing is shared with the stage."""
    loaded: dict[str, Any] = json.loads(json.dumps(dict(values), allow_nan=False))
    return loaded
