"""Whether a package is what was built: its files against the SHA-256 of each, in the manifest that lies beside them.

What Triton runs, configurations and the tokenizer are read whenever they are used, which takes milliseconds; weights
once, and again when the file has changed or was last read a month ago (`pipeline.store.FileHashes`). A package that
came without its manifest is held against the one digest in its deployment.json, which is that of all models together.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import DamagedArtifact
from pipeline.progress import Progress
from pipeline.reading import open_file
from pipeline.store import Artifact, FileHashes, Manifest, check, manifest
from pipeline.store.artifact import SMALL_BYTES
from pipeline.triton.deployment import FILE, REPOSITORY, TOKENIZER, Deployment
from pipeline.triton.repository import content_digest

_TOKENIZER = f"/{TOKENIZER}/"


def check_without_weights(package: Path, hashes: FileHashes, progress: Progress) -> None:
    """Hold all but large files against the manifest, if there is one. Raises DamagedArtifact with all that differ."""
    if (package / manifest.FILE).exists():
        artifact = Artifact(package, Manifest.load(package))
        check(
            artifact, hashes, progress, lambda name, entry: entry.bytes <= SMALL_BYTES or _TOKENIZER in name
        )


def check_package(package: Path, hashes: FileHashes, progress: Progress) -> None:
    """Hold all files against the manifest, or all models against deployment.json.

    Raises:
        DamagedArtifact: with all that differ.
    """
    if (package / manifest.FILE).exists():
        check(Artifact(package, Manifest.load(package)), hashes, progress)
        return
    with progress.task(f"verify {package.name}", unit="B") as task:

        def sha256(path: Path) -> str:
            with open_file(path) as stream:
                return hashes.sha256(stream, path, task.advance)

        found, expected = content_digest(package / REPOSITORY, sha256=sha256), Deployment.load(package).digest
    hashes.save()
    if found != expected:
        raise DamagedArtifact(
            f"{package}: damaged\n"
            f"  {REPOSITORY}: its files have together the digest {found}, and {FILE} says {expected}\n"
            "copy the package again; `pipeline store verify` tells whether the store's own is intact"
        )
