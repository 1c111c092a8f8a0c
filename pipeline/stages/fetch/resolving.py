"""What exactly a recipe's source is: the commit behind a revision, or the content of a local folder.

A full commit is taken as it is, without asking anybody. Offline, a branch or tag is what it was when the store's
checkpoint was fetched.
"""

from __future__ import annotations

import os
import re
from typing import Protocol

from pipeline.errors import SourceError
from pipeline.extras import missing
from pipeline.progress import Progress, Silent
from pipeline.recipe import HubSource, LocalSource
from pipeline.stages.fetch.local import resolve_local
from pipeline.stages.fetch.resolved import HubCheckpoint, ResolvedSource
from pipeline.store import FileHashes, Store

_COMMIT = re.compile(r"[0-9a-f]{40}")
_YES = {"1", "on", "yes", "true"}


class Asked(Protocol):
    """What a recipe says of a checkpoint."""

    @property
    def source(self) -> HubSource | LocalSource: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def allow_pickle(self) -> bool: ...


def resolve(
    asked: Asked, *, store: Store | None = None, offline: bool = False, progress: Progress | None = None
) -> ResolvedSource:
    """Settle which content `asked` means now; `HF_HUB_OFFLINE` is as good as `offline`.

    `store` remembers the hashes of local files, and answers offline. Raises SourceError.
    """
    report = progress or Silent()
    if isinstance(asked.source, LocalSource):
        hashes = FileHashes(None) if store is None else store.hashes
        return resolve_local(
            asked.source.path, allow_pickle=asked.allow_pickle, hashes=hashes, progress=report
        )
    repo, revision = asked.source.repo, asked.revision
    offline = offline or is_offline()
    if revision is not None and _COMMIT.fullmatch(revision):
        commit = revision
    elif offline:
        commit = _commit_in_store(repo, revision, store)
    else:
        commit = _commit_on_hub(repo, revision, report)
    return HubCheckpoint(repo, commit, asked.allow_pickle, revision, offline)


def is_offline() -> bool:
    """Whether the environment says that no hub is to be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in _YES


def _commit_on_hub(repo: str, revision: str | None, progress: Progress) -> str:
    try:
        from pipeline.stages.fetch.hub import Hub
    except ImportError as error:
        raise missing(f"hf:{repo}: the Hub", error, "hub") from error
    return Hub.from_environment().commit_of(repo, revision, progress.say)


def _commit_in_store(repo: str, revision: str | None, store: Store | None) -> str:
    """The commit that `revision` was when it was fetched last."""
    seen: dict[str, object] = {}
    for artifact in store.list() if store is not None else ():
        manifest = artifact.manifest
        if manifest.stage == "fetch" and manifest.settings.get("source") == f"hf:{repo}":
            commit = str(manifest.settings["commit"])
            if manifest.facts.get("revision") == revision:
                return commit
            seen[commit] = manifest.facts.get("revision")
    asked = f"revision {revision!r}" if revision else "the default branch"
    known = ", ".join(seen) or "nothing of this repository"
    raise SourceError(
        f"hf:{repo}: offline, {asked} cannot be resolved; set revision to a full commit (the store holds: {known})"
    )
