"""A source whose content is settled: the same `identity` always means the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from pipeline.store import FileEntry, Json, digest_of


@dataclass(frozen=True, slots=True)
class HubCheckpoint:
    """One commit of a repository on the Hub. Its files are listed when they are fetched."""

    repo: str  # org/name
    commit: str  # 40 hexadecimal digits
    allow_pickle: bool = False
    revision: str | None = field(default=None, compare=False)  # as the recipe asked
    offline: bool = field(default=False, compare=False)  # the store may have it; the Hub is not asked

    @property
    def label(self) -> str:
        return f"hf:{self.repo}"

    @property
    def identity(self) -> Mapping[str, Json]:
        """The part of the artifact's key."""
        pickle: Mapping[str, Json] = {"allow_pickle": True} if self.allow_pickle else {}
        return {"source": self.label, "commit": self.commit, **pickle}


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """The files of a folder as they were when they were resolved. Where the folder lies is no part of its identity."""

    path: Path
    files: Mapping[str, FileEntry]  # name -> size and hash, of the files that a fetch takes

    @property
    def label(self) -> str:
        return f"local:{self.path}"

    @property
    def identity(self) -> Mapping[str, Json]:
        """The part of the artifact's key."""
        content: Json = {
            name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in self.files.items()
        }
        return {"source": "local", "content": digest_of(content)}


ResolvedSource: TypeAlias = HubCheckpoint | LocalCheckpoint
