"""Where answers are kept, as the cache sees it: one small protocol, whatever lies behind.

A backend knows nothing of similarity rules or policies. It may be down: it then raises `BackendDown`, and the request
goes on as if nothing had been found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.entry import CacheEntry
from pipeline.cache.key import Question

Vector = NDArray[np.float32]  # [dimensions], length 1
ANY = -1.1  # a cosine that none is below, whatever rounding did


class BackendDown(Exception):
    """The backend cannot be reached or used now; the text says why. Never shown to whoever asked a question."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much is kept; beyond it what was used longest ago goes first."""

    entries: int = 100_000
    bytes: int = 1024 * 2**20  # of answers, questions and embeddings together


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry whose question is near."""

    key: bytes
    turn: str
    similarity: float  # cosine


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry with what it was found by, for listing, export and audit."""

    key: bytes
    scope: bytes
    engine: bytes
    tenant: bytes
    turn: str
    entry: CacheEntry
    used: float  # s since the epoch
    has_vector: bool


@dataclass(frozen=True, slots=True)
class EntryFilter:
    """Some entries: those that are all of what is given. By default every entry."""

    scope: bytes | None = None
    engine: bytes | None = None
    tenant: bytes | None = None
    before: float | None = None  # created, s since the epoch

    def ids(self) -> Mapping[str, bytes]:
        """What is given but `before`, by name."""
        ids = {"scope": self.scope, "engine": self.engine, "tenant": self.tenant}
        return {name: id for name, id in ids.items() if id is not None}


ALL_ENTRIES = EntryFilter()


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a backend is."""

    entries: int
    bytes: int
    with_vectors: int
    oldest: float | None  # created, s since the epoch


class Backend(Protocol):
    """Safe to use from any number of threads."""

    @property
    def remote(self) -> bool:
        """Whether a call may wait for a network."""

    def get(self, key: bytes, now: float) -> CacheEntry | None:
        """The entry of this very key, unless it is older than it may be."""

    def put(self, question: Question, entry: CacheEntry, vector: Vector | None = None) -> None:
        """Keep an answer, in place of the one that the key had. On return it is safe from the death of this process."""

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float = ANY
    ) -> Sequence[Candidate]:
        """Entries of the scope with the nearest questions, the nearest first; some may have expired since.

        Args:
            min_similarity: cosine; what is less near is not even read.
        """

    def remove(self, keys: Iterable[bytes]) -> int:
        """How many were there to be removed."""

    def purge(self, which: EntryFilter = ALL_ENTRIES) -> int:
        """Remove entries. How many there were."""

    def items(self) -> Iterator[StoredEntry]:
        """All entries, newest first."""

    def removals(self) -> int:
        """A number that changes whenever an entry goes or is replaced, by whatever process."""

    def unreadable(self) -> int:
        """How many entries this process met that are damaged, not ours, or sealed with another key; not served."""

    def usage(self) -> Usage:
        """How full it is."""

    def describe(self) -> Mapping[str, str]:
        """Kind, place and version, for people."""

    def close(self) -> None:
        """Give up files and connections."""


PASSWORD = "PIPELINE_CACHE_PASSWORD"  # environment variable


def without_password(url: str) -> str:
    """The address, if it holds no password; else a ValueError that does not show it."""
    parts = urlsplit(url)
    options = {name.lower() for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    if parts.password is not None or options & {"password", "sslpassword"}:
        raise ValueError(f"the address of the cache holds a password: put it into {PASSWORD} instead")
    return url
