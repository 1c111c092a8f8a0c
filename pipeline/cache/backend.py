"""Where answers are kept: the protocol that every backend implements, and the types that it speaks of.

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
    """The backend cannot be reached or used now; the text says why. It is never shown to who sent a request."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much is kept at most; beyond it, what was used longest ago is evicted first."""

    entries: int = 100_000
    bytes: int = 1024 * 2**20  # of answers, questions and embeddings together


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry whose question is near the one that is asked."""

    key: bytes
    turn: str
    similarity: float  # cosine


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry with its question and identifiers, for listing, export and audit."""

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
    """Selects the entries that match everything that is given; by default all entries."""

    scope: bytes | None = None
    engine: bytes | None = None
    tenant: bytes | None = None
    before: float | None = None  # created, s since the epoch

    def ids(self) -> Mapping[str, bytes]:
        """The identifiers that are given, by name: all but `before`."""
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
        """Return the entry of a key, or None if there is none or it has expired at `now` (s since the epoch)."""

    def put(self, question: Question, entry: CacheEntry, vector: Vector | None = None) -> None:
        """Store an answer, in place of the one that its key had. On return it survives the death of this process.

        Args:
            vector: embedding of the question, float32 [dimensions] of length 1; without, it is found by its key only.
        """

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float = ANY
    ) -> Sequence[Candidate]:
        """Find the entries of a scope with the nearest questions, the nearest first; some may have expired since.

        Args:
            vector: float32 [dimensions] of length 1.
            min_similarity: cosine; entries that are less near are not even read.
        """

    def remove(self, keys: Iterable[bytes]) -> int:
        """Remove entries by their keys. Returns how many were there."""

    def purge(self, which: EntryFilter = ALL_ENTRIES) -> int:
        """Remove the selected entries. Returns how many there were."""

    def items(self) -> Iterator[StoredEntry]:
        """Yield all entries, the newest first."""

    def removals(self) -> int:
        """Return a number that changes whenever any process removes or replaces an entry."""

    def unreadable(self) -> int:
        """Count entries that this process could not read: damaged, foreign, or encrypted with another key."""

    def usage(self) -> Usage:
        """Return how full it is."""

    def describe(self) -> Mapping[str, str]:
        """Describe kind, place and version, for people."""

    def close(self) -> None:
        """Close files and connections."""


# Environment variable of a server's password. It is never part of an address, which is written down and printed.
PASSWORD = "PIPELINE_CACHE_PASSWORD"


def without_password(url: str) -> str:
    """Return the address if it holds no password.

    Raises:
        ValueError: it holds one; the text does not show it.
    """
    parts = urlsplit(url)
    options = {name.lower() for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    if parts.password is not None or options & {"password", "sslpassword"}:
        raise ValueError(f"the address of the cache holds a password: put it into {PASSWORD} instead")
    return url
