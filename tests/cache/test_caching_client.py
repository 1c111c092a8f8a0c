"""The client with a cache in front, against a scripted server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cache.client import CachingClient
from pipeline.cache.key import Origin
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.sqlite import SqliteBackend
from pipeline.client import Cached, Client, ServerFailed
from pipeline.client.testing import Ending, FakeServer, Reply

ORIGIN = Origin("package")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ResponseCache]:
    cache = ResponseCache(SqliteBackend(tmp_path / "cache.db"))
    yield cache
    cache.close()


def test_a_second_request_is_answered_by_the_same_chunks(cache: ResponseCache) -> None:
    with FakeServer(Reply(["Hel", "lo ", "you"])) as server, Client(server.url) as plain:
        client = CachingClient(plain, cache, ORIGIN)
        answers, chunks = [], []
        for _ in range(2):
            with client.stream("Hi", max_tokens=8, temperature=0) as stream:
                chunks.append([(chunk.text, chunk.token_ids, chunk.finish_reason) for chunk in stream])
                answers.append(stream.answer())
        assert len(server.requests) == 1
    assert chunks[0] == chunks[1]
    assert answers[0].text == answers[1].text == "Hello you"
    assert [answer.stats.cached for answer in answers] == [None, Cached("exact")]
    assert answers[1].stats.output_tokens == answers[0].stats.output_tokens


def test_sampled_answers_are_not_kept(cache: ResponseCache) -> None:
    with FakeServer(Reply(["a"])) as server, Client(server.url) as plain:
        client = CachingClient(plain, cache, ORIGIN)
        for _ in range(2):
            assert client.generate("Hi", max_tokens=8, temperature=1.0).stats.cached is None
        assert len(server.requests) == 2


def test_opting_out(cache: ResponseCache) -> None:
    with FakeServer(Reply(["a"])) as server, Client(server.url) as plain:
        client = CachingClient(plain, cache, ORIGIN)
        client.generate("Hi", max_tokens=8, temperature=0, cache=False)
        assert cache.backend.usage().entries == 0
        client.generate("Hi", max_tokens=8, temperature=0)
        assert client.generate("Hi", max_tokens=8, temperature=0, cache=False).stats.cached is None
        assert len(server.requests) == 3


def test_a_failed_answer_is_not_kept(cache: ResponseCache) -> None:
    with FakeServer(Reply(["a"], ending=Ending.ERROR)) as server, Client(server.url) as plain:
        client = CachingClient(plain, cache, ORIGIN)
        for _ in range(2):
            with pytest.raises(ServerFailed):
                client.generate("Hi", max_tokens=8, temperature=0)
        assert len(server.requests) == 2


def test_an_answer_cut_by_its_length_is_not_kept(cache: ResponseCache) -> None:
    with FakeServer(Reply(["a", "b"])) as server, Client(server.url) as plain:
        client = CachingClient(plain, cache, ORIGIN)
        for _ in range(2):
            assert client.generate("Hi", max_tokens=2, temperature=0).finish_reason == "length"
        assert len(server.requests) == 2


def test_equal_requests_share_one_generation(cache: ResponseCache) -> None:
    texts: list[str] = []
    with FakeServer(Reply(["a", "b", "c"], delay_s=0.05)) as server, Client(server.url) as plain:
        client = CachingClient(plain, cache, ORIGIN)

        def run() -> None:
            texts.append(client.generate("Hi", max_tokens=8, temperature=0).text)

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(server.requests) == 1
    assert texts == ["abc"] * 8


def test_the_first_caller_may_leave(cache: ResponseCache) -> None:
    with FakeServer(Reply(["a", "b", "c"], delay_s=0.05)) as server, Client(server.url) as plain:
        client = CachingClient(plain, cache, ORIGIN)
        with client.stream("Hi", max_tokens=8, temperature=0) as first:
            next(first)
            second = client.stream("Hi", max_tokens=8, temperature=0).__enter__()
        assert "".join(chunk.text for chunk in second) == "abc"
        assert second.stats.cached == Cached("shared")
        second.__exit__(None, None, None)
        assert len(server.requests) == 1
        assert client.generate("Hi", max_tokens=8, temperature=0).stats.cached == Cached("exact")
