"""What is found, what is kept, and what becomes of it when the backend is down or time goes by."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.cache.backend import BackendDown, Vector
from pipeline.cache.client import CachingClient
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, Question, make_question, tenant_id
from pipeline.cache.redaction import Redaction
from pipeline.cache.response_cache import Hit, ResponseCache
from pipeline.cache.semantic.decision import Decision
from pipeline.cache.semantic.layer import SemanticLayer
from pipeline.cache.sqlite import SqliteBackend
from pipeline.cache.streams import Replay
from pipeline.client import AsyncClient, Cached, Refused
from pipeline.client.testing import FakeServer, Reply
from tests.support.cache_asking import Fine, Letters, broken

GREEDY = {"temperature": 0}


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Fails:
    """A backend, or whatever a call of it raises."""

    def __init__(self, backend: SqliteBackend) -> None:
        self.backend, self.down = backend, False

    def __getattr__(self, name: str) -> Any:
        if self.down and name != "remote":
            raise BackendDown("gone")
        return getattr(self.backend, name)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[SqliteBackend]:
    backend = SqliteBackend(tmp_path / "cache.db")
    yield backend
    backend.close()


def asked(turn: str = "What is it?", **sampling: Any) -> Question:
    return make_question(Origin("package"), turn, sampling or GREEDY)


def caching(server: FakeServer, cache: ResponseCache) -> CachingClient:
    return CachingClient(AsyncClient(server.url), cache, Origin("package"))


def keep(cache: ResponseCache, question: Question, *texts: str, ttl_s: float | None = None) -> bool:
    pieces = [StoredChunk(text) for text in texts]
    return cache.store(question, pieces, finish_reason="stop", ttl_s=ttl_s)


def text_of(hit: Hit | None) -> str | None:
    return None if hit is None else hit.entry.text


def test_a_backend_that_is_down_misses_and_comes_back(backend: SqliteBackend, clock: Clock) -> None:
    below = Fails(backend)
    cache = ResponseCache(below, clock=clock)  # type: ignore[arg-type]
    assert keep(cache, asked(), "a")
    below.down = True
    clock.now += 1
    assert cache.lookup(asked()) is None
    assert not keep(cache, asked("other"), "b")
    assert cache.counters.as_dict() == {"backend_down": 2, "miss": 1, "stored": 1}
    below.down = False
    assert text_of(cache.lookup(asked())) == "a"


def test_a_request_goes_on_without_its_backend(backend: SqliteBackend) -> None:
    below = Fails(backend)
    below.down = True
    with FakeServer(Reply(["a"])) as server, caching(server, ResponseCache(below)) as client:  # type: ignore[arg-type]
        for _ in range(2):
            assert client.generate("Hi", max_tokens=8, temperature=0).text == "a"
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("part", "method", "failures"),
    [
        ("backend", "removals", {"lookup": 4}),
        ("backend", "get", {"lookup": 4}),
        ("backend", "near", {"lookup": 3}),
        ("backend", "put", {"store": 4}),
        ("backend", "close", {"close": 1}),
        ("embedder", "__call__", {"embedding": 6}),
        ("verifier", "prepare", {"embedding": 6}),
        ("verifier", "decide", {"comparison": 3}),
        ("redactor", "objection", {"store": 4}),
    ],
)
def test_whatever_fails_in_it_is_a_miss_that_is_told_once(
    backend: SqliteBackend, caplog: pytest.LogCaptureFixture, part: str, method: str, failures: dict[str, int]
) -> None:
    asks = ["where is my parcel", "Where is my parcel?", "where is my parcel", "my parcel is where"]
    with FakeServer(Reply(["a"])) as server:
        cache = broken(backend, part, method)
        with caching(server, cache) as client:
            answers = [client.generate(text, max_tokens=8, temperature=0).text for text in asks]
    assert answers == ["a"] * 4
    counts = cache.counters.as_dict()
    assert {name: count for name, count in counts.items() if name.startswith("failed_")} == {
        f"failed_{step}": count for step, count in failures.items()
    }
    assert sum(counts.get(name, 0) for name in ("miss", "hit_exact", "hit_semantic")) == 4
    told = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.exc_info is not None for record in told] == [True] * len(failures)


def test_an_answer_that_cannot_be_decoded_is_asked_for_again(backend: SqliteBackend) -> None:
    cache = ResponseCache(backend)
    whole = CacheEntry.of(
        [StoredChunk("b")], finish_reason="stop", created=cache.clock(), expires=cache.clock() + 100
    )
    short = CacheEntry(whole.raw[:-2], whole.created, whole.expires, "stop")
    with FakeServer(Reply(["a"])) as server, caching(server, cache) as client:
        backend.put(make_question(Origin("package"), "Hi", {"max_tokens": 8, "temperature": 0}), short)
        assert client.generate("Hi", max_tokens=8, temperature=0).text == "a"
    assert (cache.counters["failed_lookup"], cache.counters["stored"]) == (1, 1)


def test_an_embedding_that_is_none_spoils_nothing(
    backend: SqliteBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is not a number would hide its neighbours in an index; one of a very long text takes long to judge."""

    class Odd(Letters):
        def __call__(self, text: str, /) -> Vector | None:
            assert len(text) < 10_000
            vector = super().__call__(text)
            return None if vector is None else vector * (np.nan if "zero" in text else 1)

    cache = ResponseCache(backend, semantic=SemanticLayer(backend, Odd(b"one"), Fine(), 0.5))
    for text in ("is it zero", "is it one", "is it " * 10_000):
        assert keep(cache, asked(text), text[:10])
        assert text_of(cache.lookup(asked(text))) == text[:10]
    assert backend.usage().with_vectors == 1
    assert text_of(cache.lookup(asked("Is it one?"))) == "is it one"
    assert cache.counters["failed_embedding"] == 1
    assert "ValueError: the embedding holds what is not a number" in caplog.text


def test_a_stored_question_that_cannot_be_compared_hides_no_other(backend: SqliteBackend) -> None:
    class Fussy(Fine):
        def decide(self, question: str, candidate: str, cosine: float) -> Decision:
            if "-rf" in candidate:
                raise IndexError(candidate)
            return super().decide(question, candidate, cosine)

    layer = SemanticLayer(backend, Letters(b"one"), Fussy(), 0.5)
    cache = ResponseCache(backend, semantic=layer)
    keep(cache, asked("how is rm -rf undone"), "never")
    keep(cache, asked("how is an rm undone"), "so")
    hit = cache.lookup(asked("How is rm undone?"))
    assert (text_of(hit), cache.counters["failed_comparison"]) == ("so", 1)


@pytest.mark.parametrize(
    ("sampling", "keep_sampled", "kept"),
    [
        ({"temperature": 0}, False, True),
        ({}, False, False),
        ({"temperature": 1.0}, True, True),
    ],
)
def test_only_what_is_repeatable_unless_asked(
    backend: SqliteBackend, sampling: Mapping[str, Any], keep_sampled: bool, kept: bool
) -> None:
    cache = ResponseCache(backend, keep_sampled=keep_sampled)
    question = make_question(Origin("package"), "Hi", sampling)
    assert keep(cache, question, "a") is kept
    assert text_of(cache.lookup(question)) == ("a" if kept else None)


@pytest.mark.parametrize(
    ("turn", "answer", "count"),
    [("Who?", "Write to ada@example.org", "e-mail"), ("I am on 555-010-9999", "Thanks", "phone")],
)
def test_what_may_not_be_kept_is_not(backend: SqliteBackend, turn: str, answer: str, count: str) -> None:
    cache = ResponseCache(backend, redactor=Redaction())
    assert not keep(cache, asked(turn), answer)
    assert backend.usage().entries == 0
    assert cache.counters[f"not_kept_redacted_{count}"] == 1


def test_an_age_is_absolute(backend: SqliteBackend, clock: Clock) -> None:
    cache = ResponseCache(backend, ttl_s=100, clock=clock)
    keep(cache, asked(), "a")
    for _ in range(3):  # being served does not make it younger
        clock.now += 33
        assert cache.lookup(asked()) is not None
    clock.now += 2
    assert cache.lookup(asked()) is None


def test_a_request_may_say_how_long(backend: SqliteBackend, clock: Clock) -> None:
    cache = ResponseCache(backend, clock=clock)
    with FakeServer(Reply(["a"])) as server, caching(server, cache) as client:
        with pytest.raises(Refused, match="ttl_s = 0"):
            client.generate("Hi", ttl_s=0, max_tokens=8, temperature=0)
        client.generate("Hi", ttl_s=5, max_tokens=8, temperature=0)
        clock.now += 4
        assert client.generate("Hi", max_tokens=8, temperature=0).stats.cached == Cached("exact")
        clock.now += 2
        assert client.generate("Hi", max_tokens=8, temperature=0).stats.cached is None


def semantic(backend: SqliteBackend, clock: Clock, digest: bytes = b"one") -> ResponseCache:
    return ResponseCache(
        backend,
        ttl_s=100,
        semantic=SemanticLayer(backend, Letters(digest), Fine(), 0.7),
        clock=clock,
    )


def test_what_means_the_same(backend: SqliteBackend, clock: Clock) -> None:
    cache = semantic(backend, clock)
    keep(cache, asked("Where is my parcel?"), "there")
    hit = cache.lookup(asked("where is my parcel"))
    assert hit is not None
    assert hit.cached.kind == "semantic"
    assert hit.cached.similarity == pytest.approx(1, abs=1e-3)
    assert cache.lookup(asked("How are you?")) is None
    assert cache.lookup(asked("where is my parcel", temperature=0, max_tokens=3)) is None  # another scope
    assert cache.lookup(asked("where is my parcel " * 4)) is None  # longer than the embedder reads


def test_a_question_that_is_not_shared_is_neither_looked_up_nor_stored_by_meaning(
    backend: SqliteBackend, clock: Clock
) -> None:
    cache = semantic(backend, clock)
    for turn, again in (
        ("где моя посылка", "Где моя посылка?"),
        ("translate: my parcel", "Translate: my parcel"),
        ("parcel where\nis it", "Parcel where\nis it"),
    ):
        assert keep(cache, asked(turn), "there")
        assert text_of(cache.lookup(asked(turn))) == "there"
        assert cache.lookup(asked(again)) is None
    assert backend.usage().with_vectors == 0
    keep(cache, asked("is it translate my parcel"), "yes")
    assert cache.lookup(asked("Translate: my parcel is it")) is None


def test_only_declared_tenants_share_near_questions(backend: SqliteBackend, clock: Clock) -> None:
    layer = SemanticLayer(backend, Letters(b"one"), Fine(), 0.7, tenants=frozenset({tenant_id("faq")}))
    cache = ResponseCache(backend, semantic=layer, clock=clock)
    for tenant, shared in (("faq", True), ("bank", False)):
        kept, again = (
            make_question(Origin("package", tenant=tenant), text, GREEDY)
            for text in ("what is my balance", "What is my balance?")
        )
        assert keep(cache, kept, tenant)
        assert text_of(cache.lookup(kept)) == tenant
        assert text_of(cache.lookup(again)) == (tenant if shared else None)
    assert backend.usage().with_vectors == 1


def test_the_verifier_decides(backend: SqliteBackend, clock: Clock) -> None:
    cache = semantic(backend, clock)
    keep(cache, asked("this is not my parcel"), "whose")
    assert cache.lookup(asked("this is my parcel")) is None


def test_embeddings_of_two_models_never_meet(backend: SqliteBackend, clock: Clock) -> None:
    keep(semantic(backend, clock, b"one"), asked("where is my parcel"), "there")
    assert semantic(backend, clock, b"two").lookup(asked("Where is my parcel?")) is None
    assert semantic(backend, clock, b"one").lookup(asked("Where is my parcel?")) is not None


@pytest.mark.parametrize("pace", [0.0, 1.0, 0.5])
def test_a_replay_takes_its_time(pace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = (0.2, 0.4, 0.0)
    entry = CacheEntry.of(
        [StoredChunk(text, delay_s=delay) for text, delay in zip("abc", delays, strict=True)],
        finish_reason="stop",
        created=0,
        expires=1,
    )
    replay, waits = Replay(Hit(entry, Cached("exact")), "id", pace), list[float]()

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)

    async def read() -> None:
        async for _ in replay:
            pass

    monkeypatch.setattr("pipeline.cache.streams.asyncio.sleep", sleep)
    asyncio.run(read())
    due: Sequence[float] = [pace * sum(delays[: n + 1]) for n in range(3)] if pace else []
    for wait, until in zip(waits, due, strict=True):
        assert wait <= until + 1e-6
        assert wait == pytest.approx(until, abs=0.1)  # less what went by since the beginning
    assert replay.text == "abc"
