"""Artifacts on disk: digests, manifests, locks, atomic publish.

    store = Store.default()
    artifact = store.obtain(ArtifactKey("fetch", {"repo": "org/name"}), make, recipe="tiny-cpu")
    store.check(artifact)     # its files are those that were published

Safe for several builders at once and for `kill -9`. Nothing here knows what a stage does.
"""

from pipeline.progress import human_bytes
from pipeline.store.artifact import Artifact, Verification, check, verify
from pipeline.store.hashes import FileHashes
from pipeline.store.key import ArtifactKey, Json, canonical, digest_of
from pipeline.store.manifest import FileEntry, Manifest, Provenance
from pipeline.store.store import Make, Store

__all__ = [
    "Artifact",
    "ArtifactKey",
    "FileEntry",
    "FileHashes",
    "Json",
    "Make",
    "Manifest",
    "Provenance",
    "Store",
    "Verification",
    "canonical",
    "check",
    "digest_of",
    "human_bytes",
    "verify",
]
