"""Exact lookup, then lookup by meaning; and what may be kept.

It never fails a request: where a backend is down, it misses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.cache.backend import Backend, BackendDown, Vector
from pipeline.cache.counters import Counters
from pipeline.cache.entry import Entry, Piece
from pipeline.cache.key import Question
from pipeline.cache.lifetime import Lifetime
from pipeline.cache.memory import Recent
from pipeline.client.chunk import FinishReason
from pipeline.client.stats import Cached

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.1  # how long an entry that another process removed may still be served from memory


@dataclass(frozen=True, slots=True)
class Hit:
    """An answer that may be given again."""

    entry: Entry
    cached: Cached


@dataclass(frozen=True, slots=True)
class Near:
    """The entry that a semantic layer found and verified."""

    key: bytes
    similarity: float


class Semantic(Protocol):
    """Finds answers to questions that mean the same."""

    def embed(self, question: Question) -> Vector | None:
        """None where the question has no meaning that can be compared, or is longer than can be read."""

    def find(self, question: Question, vector: Vector) -> Near | None:
        """The nearest entry that is near enough and passes all checks. May raise BackendDown."""


class Keeper(Protocol):
    """Judges whether an answer may be kept at all."""

    def objection(self, turn: str, answer: str) -> str | None:
        """Why not, such as "e-mail"; None if it may."""


@dataclass(slots=True)
class ResponseCache:
    """What stands in front of a deployment; safe to use from any number of threads.

    >>> cache = ResponseCache(SqliteBackend(path))             # doctest: +SKIP
    >>> hit = cache.lookup(question)                           # doctest: +SKIP
    """

    backend: Backend
    lifetime: Lifetime = field(default_factory=Lifetime)
    keep_sampled: bool = False  # answers of which each request draws another, too
    pace: float = 0.0  # how slowly clients replay an answer; 0 is at once, 1 as it once came
    semantic: Semantic | None = None
    keeper: Keeper | None = None
    recent: Recent = field(default_factory=Recent)
    counters: Counters = field(default_factory=Counters)
    clock: Callable[[], float] = time.time  # s since the epoch
    _checked_at: float = -1.0
    _removals: int = -1
    _down: str = ""  # what the backend said when it was last asked, "" if it answered

    def may_answer(self, question: Question) -> bool:
        """Whether such a request is looked up and kept: its answer is the same each time, or that was waived."""
        return question.repeatable or self.keep_sampled

    def may_wait(self, question: Question) -> bool:
        """Whether a lookup may take so long that an event loop should not do it by itself."""
        return self.backend.remote or (self.semantic is not None and question.comparable)

    def lookup(self, question: Question) -> Hit | None:
        """A kept answer to this request, or to one that means the same; None if there is none."""
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
        self.counters.add(f"hit_{hit.cached.kind}" if hit else "miss")
        return hit

    def store(
        self,
        question: Question,
        pieces: Sequence[Piece],
        *,
        finish_reason: FinishReason,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        ttl_s: float | None = None,
    ) -> bool:
        """Keep an answer that came to its end; whether it was kept. What was cut off never is.

        Args:
            ttl_s: how long it may be served; by default what `lifetime` says of its question.
        """
        refusal = self._refusal(question, pieces, finish_reason)
        if refusal:
            self.counters.add(f"not_kept_{refusal}")
            return False
        now = self.clock()
        entry = Entry.of(
            pieces,
            finish_reason=finish_reason,
            created=now,
            expires=now + (self.lifetime.of(question.turn) if ttl_s is None else ttl_s),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )
        try:
            self.backend.put(question, entry, self._vector(question))
            self._up()
        except BackendDown as error:
            self._is_down(error)
            return False
        self.recent.put(question.key, entry)
        self.counters.add("stored")
        return True

    def close(self) -> None:
        """Give up the backend."""
        self.backend.close()

    def _exact(self, key: bytes, now: float) -> Hit | None:
        self._follow(now)
        entry = self.recent.get(key, now)
        if entry is None:
            entry = self.backend.get(key, now)
            if entry is not None:
                self.recent.put(key, entry)
        return None if entry is None else Hit(entry, _EXACT)

    def _near(self, question: Question, now: float) -> Hit | None:
        vector = self._vector(question)
        if vector is None or self.semantic is None:
            return None
        near = self.semantic.find(question, vector)
        entry = None if near is None else self.backend.get(near.key, now)
        if near is None or entry is None:
            return None
        if (
            entry.created + self.lifetime.of(question.turn) <= now
        ):  # asked for what is newer than its question did
            return None
        return Hit(entry, Cached("semantic", near.similarity))

    def _vector(self, question: Question) -> Vector | None:
        return self.semantic.embed(question) if self.semantic is not None and question.comparable else None

    def _follow(self, now: float) -> None:
        """Forget what other processes removed."""
        if 0 <= now - self._checked_at < _LOOK_AGAIN_S:
            return
        self._checked_at = now
        removals = self.backend.removals()
        if removals != self._removals:
            self._removals = removals
            self.recent.clear()

    def _refusal(self, question: Question, pieces: Sequence[Piece], finish_reason: FinishReason) -> str:
        if not self.may_answer(question):
            return "sampled"
        if finish_reason == "length":
            return "cut"
        if not pieces:
            return "empty"
        objection = self.keeper and self.keeper.objection(
            question.turn, "".join(piece.text for piece in pieces)
        )
        return f"redacted_{objection}" if objection else ""

    def _is_down(self, error: BackendDown) -> None:
        self.counters.add("backend_down")
        self.recent.clear()  # what it would say of them now is not known
        if not self._down:
            _log.warning("the response cache is not used for now: %s", error)
        self._down = str(error)

    def _up(self) -> None:
        if self._down:
            _log.warning("the response cache is used again")
            self._down = ""


_EXACT = Cached("exact")
