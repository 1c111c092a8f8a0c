"""Artifacts on disk: digests, manifests, locks, atomic publish. See `store`."""

from pipeline.progress import human_bytes
from pipeline.store.artifact import Artifact, Verification, check, verify
from pipeline.store.canonical import Json, canonical, digest_of
from pipeline.store.hashes import FileHashes
from pipeline.store.key import ArtifactKey
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
