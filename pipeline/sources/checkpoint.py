"""A checkpoint whose content is settled: the commit behind a revision, or the hashes of a local folder's files.

A full commit is taken as it is, without asking anybody. Offline, a branch or tag is what it was when the store's
checkpoint was fetched. Nothing is downloaded here; `pipeline.stages.fetch` brings the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from pipeline.errors import SourceError
from pipeline.extras import missing
from pipeline.models.folder import CheckpointFolder
from pipeline.progress import Progress, Silent
from pipeline.recipe import HubSource, LocalSource
from pipeline.sources.selection import chosen_files
from pipeline.store import FileEntry, FileHashes, Json, Store, digest_of

_COMMIT = re.compile(r"[0-9a-f]{40}")
_YES = {"1", "on", "yes", "true"}


@dataclass(frozen=True, slots=True)
class HubCheckpoint:
    """One commit of a repository on the Hub. Its files are listed when they are fetched."""

    repo: str  # org/name
    commit: str  # 40 hexadecimal digits
    allow_pickle: bool = False
    # A LoRA adapter, and no model.
    adapter: bool = False
    # As the recipe says it.
    revision: str | None = field(default=None, compare=False)
    # The Hub is not asked; the store may have the files.
    offline: bool = field(default=False, compare=False)

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"hf:{self.repo}"

    @property
    def identity(self) -> Mapping[str, Json]:
        """Identity that the key of the fetched artifact is made from."""
        options: Mapping[str, Json] = {
            name: True for name in ("allow_pickle", "adapter") if getattr(self, name)
        }
        return {"source": self.label, "commit": self.commit, **options}


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """The files of a folder as they were when they were resolved. Where the folder lies is no part of its identity."""

    path: Path
    files: Mapping[str, FileEntry]  # name -> size and hash, of the files that a fetch takes
    adapter: bool = False  # a LoRA adapter, and no model

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"local:{self.path}"

    @property
    def identity(self) -> Mapping[str, Json]:
        """Identity that the key of the fetched artifact is made from."""
        content: Json = {
            name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in self.files.items()
        }
        return {"source": "local", "content": digest_of(content)}


ResolvedSource: TypeAlias = HubCheckpoint | LocalCheckpoint


class SourceRequest(Protocol):
    """Source of a recipe: of its `model`, its `draft`, or one of its `adapters`."""

    @property
    def source(self) -> HubSource | LocalSource: ...
    @property
    def revision(self) -> str | None: ...


def resolve_checkpoint(
    request: SourceRequest,
    *,
    adapter: bool = False,
    store: Store | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> ResolvedSource:
    """Settle which content a recipe's checkpoint means now.

    Args:
        request: Source, revision, and for a checkpoint whether pickles are allowed (`allow_pickle`).
        adapter: Whether it is a LoRA adapter, and no model.
        store: Remembers the hashes of local files, and knows commits offline.
        offline: Do not ask the Hub; so does `HF_HUB_OFFLINE`.
        progress: Shows the hashing of local files, and retries.

    Raises:
        SourceError: It does not exist, or the Hub cannot be asked.
        InvalidInput: A local folder holds links that lead out of it, or files that are not regular.
    """
    report = progress or Silent()
    allow_pickle = bool(getattr(request, "allow_pickle", False))
    if isinstance(request.source, LocalSource):
        hashes = FileHashes(None) if store is None else store.hashes
        chosen = chosen_files(request.source.path, allow_pickle=allow_pickle, adapter=adapter)
        return LocalCheckpoint(request.source.path, _hashed(*chosen, hashes, report), adapter)
    repo, revision = request.source.repo, request.revision
    offline = offline or is_offline()
    if revision is not None and _COMMIT.fullmatch(revision):
        commit = revision
    elif offline:
        commit = _commit_in_store(repo, revision, store)
    else:
        commit = _commit_on_hub(repo, revision, report)
    return HubCheckpoint(repo, commit, allow_pickle, adapter, revision, offline)


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` says that the Hub is not to be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in _YES


def find_fetched(
    source: HubSource, revision: str | None, store: Store, *, graph: bool = False
) -> Path | None:
    """Find the store's checkpoint of a Hub source at a revision (a commit, or the name it was fetched by).

    Args:
        revision: a commit, branch or tag; None: one that was fetched without naming a revision.
        store: where to look.
        graph: whether its published ONNX graph is wanted, where it has one, instead of its weights.

    Returns:
        The folder of the checkpoint; None if it is not in the store.
    """
    for artifact in store.list():
        settings, facts = artifact.manifest.settings, artifact.manifest.facts
        matches = artifact.manifest.stage == "fetch" and settings.get("source") == str(source)
        matches = matches and bool(settings.get("graph")) == graph
        if matches and revision in (settings.get("commit"), facts.get("revision")):
            return artifact.path
    return None


def _hashed(
    folder: CheckpointFolder, taken: Sequence[str], hashes: FileHashes, progress: Progress
) -> dict[str, FileEntry]:
    path = folder.path
    total = sum((path / name).stat().st_size for name in taken)
    entries: dict[str, FileEntry] = {}
    with progress.task(f"read {path.name}", total, "B") as task:
        for name in taken:
            with folder.open(name) as stream:
                digest = hashes.sha256(stream, path / name, task.advance)
                entries[name] = FileEntry(bytes=os.fstat(stream.fileno()).st_size, sha256=digest)
    hashes.save()
    return entries


def _commit_on_hub(repo: str, revision: str | None, progress: Progress) -> str:
    try:
        from pipeline.sources.hub import HubClient
    except ImportError as error:
        raise missing(f"hf:{repo}: the Hub", error, "hub") from error
    return HubClient.from_environment().commit_of(repo, revision, progress.say)


def _commit_in_store(repo: str, revision: str | None, store: Store | None) -> str:
    """The commit that `revision` was when it was fetched last."""
    revisions: dict[str, object] = {}
    for artifact in store.list() if store is not None else ():
        manifest = artifact.manifest
        if manifest.stage == "fetch" and manifest.settings.get("source") == f"hf:{repo}":
            commit = str(manifest.settings["commit"])
            if manifest.facts.get("revision") == revision:
                return commit
            revisions[commit] = manifest.facts.get("revision")
    wanted = f"revision {revision!r}" if revision else "the default branch"
    known = ", ".join(revisions) or "nothing of this repository"
    raise SourceError(
        f"hf:{repo}: offline, {wanted} cannot be resolved; set revision to a full commit (the store holds: {known})"
    )
