"""An artifact: a published, read-only directory and its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.progress import Progress, Silent
from pipeline.store import files, manifest
from pipeline.store.manifest import Manifest


@dataclass(frozen=True)
class Artifact:
    """What a stage left in the store."""

    path: Path  # the directory; nobody writes into it
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
    """What differs between an artifact and its manifest, as sorted paths."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not (self.missing or self.extra or self.changed)

    def __str__(self) -> str:
        parts = (("missing", self.missing), ("extra", self.extra), ("changed", self.changed))
        return "; ".join(f"{title}: {', '.join(paths)}" for title, paths in parts if paths) or "intact"


def verify(artifact: Artifact, progress: Progress | None = None) -> Verification:
    """Hash every file again and compare; a manifest that does not give its own digest counts as changed."""
    recorded = artifact.manifest.files
    found = {
        name: info for name, info in files.walk(artifact.path) if name not in (manifest.FILE, manifest.TWIN)
    }
    both = sorted(recorded.keys() & found.keys())
    same_size = [n for n in both if files.is_plain(found[n]) and found[n].st_size == recorded[n].bytes]
    total = sum(recorded[name].bytes for name in same_size)
    with (progress or Silent()).task(f"verify {artifact.name}", total, "B") as task:
        hashes = files.sha256_all(artifact.path, same_size, task.advance)
    changed = [name for name in both if hashes.get(name) != recorded[name].sha256]
    if artifact.manifest.key.digest != artifact.digest:
        changed.append(manifest.FILE)
    return Verification(
        missing=tuple(sorted(recorded.keys() - found.keys())),
        extra=tuple(sorted(found.keys() - recorded.keys())),
        changed=tuple(sorted(changed)),
    )


def quick_check(artifact: Artifact) -> Verification:
    """As `verify`, by presence and size only: milliseconds, for every look-up."""
    missing, changed = [], []
    for name, entry in artifact.manifest.files.items():
        try:
            if (artifact.path / name).stat().st_size != entry.bytes:
                changed.append(name)
        except FileNotFoundError:
            missing.append(name)
    return Verification(missing=tuple(sorted(missing)), changed=tuple(sorted(changed)))
