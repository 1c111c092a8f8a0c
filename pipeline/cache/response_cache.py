"""The response cache: exact lookup, then semantic lookup; and what may be stored.

It never fails a request. Where a backend is down, it misses. Whatever else fails inside the cache (an embedder, a
check, a stored answer that cannot be decoded, an error in our own code) is a miss too: it is counted as
`failed_<step>`, and the first failure of each kind is logged with its traceback.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from pipeline.cache.backend import Backend, BackendDown, Candidate, Vector
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Question
from pipeline.cache.near_hits import NearHitLog
from pipeline.client import Cached, FinishReason

if TYPE_CHECKING:
    from pipeline.cache.redaction import Redaction
    from pipeline.cache.semantic.layer import SemanticLayer

_log = logging.getLogger(__name__)
# Step in which something failed; `failed_<step>` is its counter.
Step = Literal["question", "lookup", "embedding", "comparison", "review", "store", "removal", "close"]
# Time for which an entry that another process removed may still be served from memory.
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer that serves a request, and how it was found."""

    entry: CacheEntry
    cached: Cached


class CacheCounters:
    """Named counts that only rise; safe to use from any number of threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, by: int = 1) -> None:
        """Raise a count."""
        with self._lock:
            self._counts[name] += by

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def as_dict(self) -> Mapping[str, int]:
        """Return all counts, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))


class HotTier:
    """Answers in the memory of this process, in front of a slower backend: a bounded LRU table; thread-safe."""

    def __init__(self, entries: int = 4096, max_bytes: int = 64 * 2**20) -> None:
        self._most, self._max_bytes = entries, max_bytes
        self._bytes = 0
        # In the order of use.
        self._table: dict[bytes, CacheEntry] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    def get(self, key: bytes, now: float) -> CacheEntry | None:
        """Return the entry of a key, unless it has expired at `now` (s since the epoch)."""
        with self._lock:
            entry = self._table.pop(key, None)
            if entry is None:
                return None
            if entry.expires <= now:
                self._bytes -= len(entry.raw)
                return None
            self._table[key] = entry
            return entry

    def put(self, key: bytes, entry: CacheEntry) -> None:
        """Hold an entry, unless it is larger than the whole table may be."""
        with self._lock:
            self._drop(key)
            self._table[key] = entry
            self._bytes += len(entry.raw)
            while self._table and (len(self._table) > self._most or self._bytes > self._max_bytes):
                self._drop(next(iter(self._table)))

    def remove(self, key: bytes) -> None:
        """Drop one entry."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._table.clear()
            self._bytes = 0

    def _drop(self, key: bytes) -> None:
        entry = self._table.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry.raw)


@dataclass(slots=True)
class ResponseCache:
    """Stored answers in front of a deployment; safe to use from any number of threads.

    >>> cache = ResponseCache(SqliteBackend(path))             # doctest: +SKIP
    >>> hit = cache.lookup(question)                           # doctest: +SKIP
    """

    backend: Backend
    # Time for which an answer may be served, from when it was given, in seconds.
    ttl_s: float = 86_400.0
    # Store sampled answers too, of which each request would draw another.
    keep_sampled: bool = False
    # Factor on the time between chunks of a replayed answer: 0 is at once, 1 as it once came.
    pace: float = 0.0
    # Finds answers to questions that mean the same; an error in it costs a hit, never a request.
    semantic: SemanticLayer | None = None
    # Near hits are counted and kept for review, and the model answers.
    shadow: bool = False
    # Near hits that are kept for a person to judge.
    near_hits: NearHitLog | None = None
    # Decides whether an answer may be stored at all.
    redactor: Redaction | None = None
    hot_tier: HotTier = field(default_factory=HotTier)
    counters: CacheCounters = field(default_factory=CacheCounters)
    # s since the epoch
    clock: Callable[[], float] = time.time
    _checked_at: float = -1.0
    _removals: int = -1
    # Error of the backend when it was last asked; "" if it answered.
    _down: str = ""
    # Kinds of failures that were logged.
    _logged: set[tuple[object, ...]] = field(default_factory=set)

    def may_answer(self, question: Question) -> bool:
        """Whether a request is looked up and stored: its answer is always the same, or `keep_sampled` is set."""
        return question.repeatable or self.keep_sampled

    def lookup(self, question: Question) -> Hit | None:
        """Look up an answer to this request, or to one that means the same; None if there is none. Raises nothing."""
        if not self.may_answer(question):
            self.counters.add("uncacheable")
            return None
        now = self.clock()
        try:
            hit = self._exact(question.key, now) or self._near(question, now)
            self._up()
        except BackendDown as error:
            hit = None
            self._is_down(error)
        except Exception as error:
            hit = None
            self.hot_tier.clear()
            self.failed("lookup", error)
        self.counters.add(f"hit_{hit.cached.kind}" if hit else "miss")
        return hit

    def store(
        self,
        question: Question,
        pieces: Sequence[StoredChunk],
        *,
        finish_reason: FinishReason,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        ttl_s: float | None = None,
    ) -> bool:
        """Store a complete answer; one that was cut off is never stored. Raises nothing.

        Args:
            input_tokens: tokens of the prompt; None if the server did not say.
            output_tokens: tokens of the answer; None if the server did not say.
            ttl_s: time for which it may be served, in seconds; by default that of the cache.

        Returns:
            Whether it was stored.
        """
        with self.contained("store"):
            refusal = self._refusal(question, pieces, finish_reason)
            if refusal:
                self.counters.add(f"not_kept_{refusal}")
                return False
            now = self.clock()
            entry = CacheEntry.of(
                pieces,
                finish_reason=finish_reason,
                created=now,
                expires=now + (self.ttl_s if ttl_s is None else ttl_s),
                input_tokens=input_tokens,
                output_tokens=output_tokens,
            )
            try:
                self.backend.put(question, entry, self._vector(question))
                self._up()
            except BackendDown as error:
                self._is_down(error)
                return False
            self.hot_tier.put(question.key, entry)
            self.counters.add("stored")
            return True
        return False

    def report_false_hit(self, keys: Sequence[bytes]) -> int:
        """Count that an answer from the cache was wrong, and remove the entries that gave it. Raises nothing.

        Returns:
            Number of entries that were still there.
        """
        self.counters.add("false_hit_reported")
        for key in keys:
            self.hot_tier.remove(key)
        with self.contained("removal"):
            return self.backend.remove(keys)
        return 0

    def count_marks(self) -> None:
        """Count the near hits that were marked as wrong since the last call of any process. Raises nothing."""
        if self.near_hits is not None:
            # Lookups report that the backend is down.
            with self.contained("review"), suppress(BackendDown):
                if marks := self.near_hits.take_marks():
                    self.counters.add("false_hit_reported", marks)

    def close(self) -> None:
        """Close the backends."""
        if self.near_hits is not None:
            with self.contained("close"):
                self.near_hits.close()
        with self.contained("close"):
            self.backend.close()

    def contained(self, step: Step) -> _ContainedErrors:
        """Return a context that no Exception leaves; see `failed`.

        Where the block returns from its function, what follows it runs after a failure only.

        Args:
            step: names the block in the log and the counters.
        """
        return _ContainedErrors(self, step)

    def failed(self, step: Step, error: Exception) -> None:
        """Count a failure as `failed_STEP`, and log the first one of each type at each line of code."""
        self.counters.add(f"failed_{step}")
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = trace and (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        if (kind := (step, type(error), place)) not in self._logged:
            self._logged.add(kind)
            _log.error(
                "the response cache failed (%s), and the request goes on without it;"
                " more failures like this one are counted as failed_%s and not logged",
                step,
                step,
                exc_info=error,
            )

    def _exact(self, key: bytes, now: float) -> Hit | None:
        self._follow(now)
        entry = self.hot_tier.get(key, now)
        if entry is None:
            entry = self.backend.get(key, now)
            if entry is not None:
                self.hot_tier.put(key, entry)
        return None if entry is None else Hit(entry, Cached("exact", key=key.hex()))

    def _near(self, question: Question, now: float) -> Hit | None:
        vector = self._vector(question)
        if vector is None or self.semantic is None:
            return None
        candidates = self.semantic.near(question, vector)
        near = next((candidate for candidate in candidates if self._serves(question, candidate)), None)
        entry = None if near is None else self.backend.get(near.key, now)
        if near is None or entry is None:
            return None
        self._note(question, near, now)
        if self.shadow:
            self.counters.add("shadow_semantic")
            return None
        return Hit(entry, Cached("semantic", near.similarity, near.key.hex()))

    def _note(self, question: Question, near: Candidate, now: float) -> None:
        """Keep a near hit for review, unless its question holds what may not be kept."""
        if self.near_hits is None:
            return
        with self.contained("review"):
            if self.redactor is None or self.redactor.objection(question.turn, "") is None:
                self.near_hits.note(
                    question, near, now, lambda error: self.failed("review", error), shadow=self.shadow
                )

    def _serves(self, question: Question, candidate: Candidate) -> bool:
        """Whether a candidate serves; False if it cannot be compared, which must not hide the candidates after it."""
        with self.contained("comparison"):
            return self.semantic is not None and self.semantic.serves(question, candidate)
        return False

    def _vector(self, question: Question) -> Vector | None:
        """Embed a question; None also if that fails: exact lookup goes on without it."""
        if self.semantic is not None and question.comparable:
            with self.contained("embedding"):
                return self.semantic.embed(question)
        return None

    def _follow(self, now: float) -> None:
        """Clear the hot tier if any process removed an entry since the last look."""
        if 0 <= now - self._checked_at < _LOOK_AGAIN_S:
            return
        self._checked_at = now
        removals = self.backend.removals()
        if removals != self._removals:
            self._removals = removals
            self.hot_tier.clear()

    def _refusal(self, question: Question, pieces: Sequence[StoredChunk], finish_reason: FinishReason) -> str:
        if not self.may_answer(question):
            return "sampled"
        if finish_reason == "length":
            return "cut"
        if not pieces:
            return "empty"
        objection = self.redactor and self.redactor.objection(
            question.turn, "".join(piece.text for piece in pieces)
        )
        return f"redacted_{objection}" if objection else ""

    def _is_down(self, error: BackendDown) -> None:
        self.counters.add("backend_down")
        # The backend may have lost or removed any of them meanwhile.
        self.hot_tier.clear()
        if not self._down:
            _log.warning("the response cache is not used for now: %s", error)
        self._down = str(error)

    def _up(self) -> None:
        if self._down:
            _log.warning("the response cache is used again")
            self._down = ""


class _ContainedErrors:
    """See `ResponseCache.contained`."""

    __slots__ = ("_cache", "_step")

    def __init__(self, cache: ResponseCache, step: Step) -> None:
        self._cache, self._step = cache, step

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self._cache.failed(self._step, error)
            return True
        return False
