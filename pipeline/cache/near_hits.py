"""Near hits that were served, kept for a person to judge: which question was asked, and whose answer it got.

They lie in a cache of their own beside that of the answers: on the same backend, encrypted with the same key, removed
by the same filters when a tenant or an engine is purged, and kept as long as an answer may be served. A thread writes
them, so that no answer waits for it; the last ones may be lost when a process is killed.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, zip_longest
from pathlib import Path
from typing import Literal

from pipeline.cache.backend import Backend, BackendDown, Candidate, Capacity, EntryFilter
from pipeline.cache.backends import file_of, is_file
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import DIGEST_BYTES, Question

# Reason for which a near hit is shown to a person.
Sample = Literal["random", "most similar"]
# What a person reads in weeks.
NEAR_HITS = Capacity(entries=10_000, bytes=64 * 2**20)
# Most near hits that wait to be written; more are passed over.
_WAITING = 1000
# Recent near hits of this process that are not written again.
_REMEMBERED = 4096
# Scope of marks that have not been counted yet; no conversation has it.
_MARKS = blake2b(b"marks of a review", digest_size=DIGEST_BYTES).digest()
_MARK_KEPT_S = 30 * 86_400.0


def near_hits_place(place: str | Path, name: str) -> tuple[str | Path, str]:
    """Return the place and the name of a cache's near hits: a file beside its file, or the same server.

    >>> near_hits_place("answers.db", "pipeline")[0].name
    'answers.near-hits.db'
    """
    if is_file(place):
        file = file_of(place)
        return file.with_name(f"{file.stem}.near-hits{file.suffix}"), name
    return place, f"{name}.near-hits"


@dataclass(frozen=True, slots=True)
class NearHit:
    """A question that was answered with the answer to another.

    Attributes:
        question: question that was asked; its key is the id of the hit.
        key: key of the entry whose answer was served.
        kept: question of that entry.
        similarity: cosine of the two questions' embeddings.
        served: time, s since the epoch.
        shadow: whether it was only found, and the model answered.
    """

    question: Question
    key: bytes
    kept: str
    similarity: float
    served: float
    shadow: bool = False


class NearHitLog:
    """Near hits on a backend of their own; safe to use from any number of threads and processes."""

    def __init__(self, backend: Backend, ttl_s: float = _MARK_KEPT_S) -> None:
        """
        Args:
            backend: holds near hits alone; closed with this.
            ttl_s: time for which a near hit is kept, in seconds.
        """
        self._backend, self._ttl_s = backend, ttl_s
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="near-hits")
        self._waiting = threading.BoundedSemaphore(_WAITING)
        self._noted: dict[tuple[bytes, bytes], None] = {}
        self._lock = threading.Lock()
        self._removals: int | None = None

    def note(
        self,
        question: Question,
        served: Candidate,
        now: float,
        failed: Callable[[Exception], None],
        *,
        shadow: bool = False,
    ) -> None:
        """Keep a near hit, soon. Of the same question with the same answer, one is kept.

        Args:
            served: entry whose answer the question got.
            now: s since the epoch.
            failed: called if writing it fails.
            shadow: see `NearHit`.
        """
        of = (question.key, served.key)
        with self._lock:
            if of in self._noted or not self._waiting.acquire(blocking=False):
                return
            self._noted[of] = None
            if len(self._noted) > _REMEMBERED:
                self._noted.pop(next(iter(self._noted)))
        hit = NearHit(question, served.key, served.turn, served.similarity, now, shadow)
        self._writer.submit(self._write, hit, failed)

    def hits(self, now: float) -> Iterator[NearHit]:
        """Yield the near hits that were not judged yet, the latest first. `now` is s since the epoch."""
        for stored in self._backend.items():
            if stored.scope == _MARKS or stored.entry.expires <= now:
                continue
            row = json.loads(stored.entry.text)
            question = Question(
                stored.scope, stored.engine, stored.tenant, stored.turn, comparable=True, repeatable=True
            )
            yield NearHit(
                question,
                bytes.fromhex(row["key"]),
                row["kept"],
                row["similarity"],
                stored.entry.created,
                row["shadow"],
            )

    def judge(self, hit: NearHit, *, wrong: bool, now: float) -> None:
        """Take a near hit from the list.

        One that was served and wrong is counted by the gateway, whenever it is asked for its metrics.
        """
        if wrong and not hit.shadow:
            question = hit.question
            mark = Question(
                _MARKS,
                question.engine,
                question.tenant,
                question.key.hex(),
                comparable=False,
                repeatable=True,
            )
            self._put(mark, "{}", now, _MARK_KEPT_S)
        # This comes last: that something was removed is what `take_marks` looks for.
        self._backend.remove([hit.question.key])

    def take_marks(self) -> int:
        """Count the hits that were judged wrong and not counted before, by this process or another."""
        removals = self._backend.removals()
        if removals == self._removals:
            return 0
        self._removals = removals
        marks = [stored.key for stored in self._backend.items() if stored.scope == _MARKS]
        # The process that removes a mark counts it.
        return sum(self._backend.remove([mark]) for mark in marks)

    def purge(self, which: EntryFilter) -> int:
        """Remove the near hits whose questions match. Returns how many there were."""
        return self._backend.purge(which)

    def flush(self) -> None:
        """Wait until what was noted so far has been written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what was noted, and close the backend."""
        self._writer.shutdown()
        self._backend.close()

    def _write(self, hit: NearHit, failed: Callable[[Exception], None]) -> None:
        try:
            row = {
                "key": hit.key.hex(),
                "kept": hit.kept,
                "similarity": round(hit.similarity, 4),
                "shadow": hit.shadow,
            }
            self._put(hit.question, json.dumps(row, ensure_ascii=False), hit.served, self._ttl_s)
        except BackendDown:
            # Lookups report it.
            pass
        except Exception as error:
            failed(error)
        finally:
            self._waiting.release()

    def _put(self, question: Question, text: str, now: float, ttl_s: float) -> None:
        entry = CacheEntry.of([StoredChunk(text)], finish_reason="stop", created=now, expires=now + ttl_s)
        self._backend.put(question, entry)


def sample_hits(hits: Sequence[NearHit], limit: int) -> list[tuple[NearHit, Sample]]:
    """Draw a random sample of all near hits, in turns with the most similar of the others."""
    drawn = random.sample(hits, min(len(hits), limit) // 2)
    drawn_keys = {hit.question.key for hit in drawn}
    others = sorted(
        (hit for hit in hits if hit.question.key not in drawn_keys),
        key=lambda hit: hit.similarity,
        reverse=True,
    )
    similar: list[tuple[NearHit, Sample]] = [(hit, "most similar") for hit in others[: limit - len(drawn)]]
    sample: list[tuple[NearHit, Sample]] = [(hit, "random") for hit in drawn]
    return [entry for entry in chain.from_iterable(zip_longest(similar, sample)) if entry is not None]
