"""An artifact: a published, read-only directory and its manifest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from pipeline.errors import DamagedArtifact
from pipeline.progress import Progress, Silent
from pipeline.reading import kind_of
from pipeline.store import files, manifest, signature
from pipeline.store.hashes import FileHashes
from pipeline.store.manifest import FileEntry, Manifest

SMALL_BYTES = 1 << 20  # files up to this are read whenever they are used


@dataclass(frozen=True)
class Artifact:
    """A published directory and its manifest."""

    path: Path  # the directory, which is read-only
    manifest: Manifest

    @property
    def digest(self) -> str:
        """64 hexadecimal digits: what other artifacts name as their input."""
        return self.manifest.digest

    @property
    def name(self) -> str:
        return self.manifest.name


@dataclass(frozen=True)
class Verification:
    """Differences between an artifact and its manifest, as sorted paths."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    # A line for each that is missing or changed: what it is, and what it should be.
    faults: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not (self.missing or self.extra or self.changed)

    def __str__(self) -> str:
        parts = (("missing", self.missing), ("extra", self.extra), ("changed", self.changed))
        return "; ".join(f"{title}: {', '.join(paths)}" for title, paths in parts if paths) or "intact"


def verify(
    artifact: Artifact,
    progress: Progress | None = None,
    hashes: FileHashes | None = None,
    *,
    again: bool = True,
    only: Callable[[str, FileEntry], bool] = lambda *_: True,
) -> Verification:
    """Hash an artifact's files and compare them with its manifest.

    A manifest that does not give its own digest counts as changed.

    Args:
        hashes: remembers what is found.
        again: read every file; else `hashes` is believed for those of more than SMALL_BYTES.
        only: which files, by name and entry in the manifest.
    """
    recorded = {name: entry for name, entry in artifact.manifest.files.items() if only(name, entry)}
    present = {
        name: info
        for name, info in files.walk(artifact.path)
        if name not in (manifest.FILE, manifest.TWIN, signature.FILE)
    }
    both = sorted(recorded.keys() & present.keys())
    same_size = [n for n in both if files.is_plain(present[n]) and present[n].st_size == recorded[n].bytes]
    total = sum(recorded[name].bytes for name in same_size)
    with (progress or Silent()).task(f"verify {artifact.name}", total, "B") as task:

        def sha256(stream: BufferedReader, name: str) -> str:
            if hashes is None or recorded[name].bytes <= SMALL_BYTES:
                return files.sha256(stream, task.advance)
            return hashes.sha256(stream, artifact.path / name, task.advance, again=again)

        digests = files.sha256_all(artifact.path, same_size, of=sha256)
    missing = sorted(recorded.keys() - present.keys())
    changed = [name for name in both if digests.get(name) != recorded[name].sha256]
    faults = [f"{name}: is missing" for name in missing]
    faults += [f"{name}: {_difference(recorded[name], present[name], digests.get(name))}" for name in changed]
    if artifact.manifest.key.digest != artifact.digest:
        changed.append(manifest.FILE)
        faults.append(f"{manifest.FILE}: does not give the digest {artifact.digest}, which it names")
    return Verification(
        missing=tuple(missing),
        extra=tuple(sorted(present.keys() - artifact.manifest.files.keys())),
        changed=tuple(sorted(changed)),
        faults=tuple(faults),
    )


def _difference(entry: FileEntry, info: os.stat_result, digest: str | None) -> str:
    if not files.is_plain(info):
        return f"is {kind_of(info)}, not a file"
    if digest is None:
        return f"has {info.st_size} bytes, and was published with {entry.bytes}"
    return f"has the SHA-256 {digest}, and was published with {entry.sha256}"


def check(
    artifact: Artifact,
    hashes: FileHashes,
    progress: Progress | None = None,
    only: Callable[[str, FileEntry], bool] = lambda *_: True,
    *,
    command: str = "pipeline store verify --remove",
) -> None:
    """Make sure that an artifact's files are those that were published, before they are used.

    Args:
        hashes: large files that it knows are not read.
        only: which files, by name and entry in the manifest.
        command: command that finds and removes damaged artifacts, for messages.

    Raises:
        DamagedArtifact: with all files that differ.
    """
    result = verify(artifact, progress, hashes, again=False, only=only)
    hashes.save()
    if result.faults:
        raise damaged(artifact, result, command)


def damaged(artifact: Artifact, result: Verification, command: str) -> DamagedArtifact:
    """Make the error for a damaged artifact.

    Args:
        command: command that finds and removes it, for messages.
    """
    lines = [f"{artifact.path}: damaged", *(f"  {fault}" for fault in result.faults)]
    help_ = f"`{command}` finds and removes what is damaged in the store; then build it again"
    return DamagedArtifact("\n".join([*lines, help_]))


def quick_check(artifact: Artifact) -> Verification:
    """Compare presence and size of files only, which takes milliseconds, for every look-up."""
    missing, faults, changed = [], [], []
    for name, entry in artifact.manifest.files.items():
        try:
            info = (artifact.path / name).stat()
        except FileNotFoundError:
            missing.append(name)
            faults.append(f"{name}: is missing")
            continue
        if info.st_size != entry.bytes:
            changed.append(name)
            faults.append(f"{name}: {_difference(entry, info, None)}")
    return Verification(
        missing=tuple(sorted(missing)), changed=tuple(sorted(changed)), faults=tuple(sorted(faults))
    )
