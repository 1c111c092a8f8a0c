"""The clients with a cache in front, against a scripted server; most through the blocking one, which runs the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache.client import AsyncCachingClient, CachingClient
from pipeline.cache.key import Origin
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.sqlite import SqliteBackend
from pipeline.client import AsyncClient, Cached, Cancelled, ServerFailed, request_headers
from pipeline.client.testing import Ending, FakeServer, Reply

ORIGIN = Origin("package")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ResponseCache]:
    cache = ResponseCache(SqliteBackend(tmp_path / "cache.db"))
    yield cache
    cache.close()


def caching(server: FakeServer, cache: ResponseCache) -> CachingClient:
    return CachingClient(AsyncClient(server.url), cache, ORIGIN)


def test_a_second_request_is_answered_by_the_same_chunks(cache: ResponseCache) -> None:
    with FakeServer(Reply(["Hel", "lo ", "you"])) as server, caching(server, cache) as client:
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


@pytest.mark.parametrize(
    ("ending", "request_"),
    [
        (Ending.EMPTY, {"max_tokens": 8, "temperature": 1.0}),
        (Ending.EMPTY, {"max_tokens": 1, "temperature": 0}),
        (Ending.ERROR, {"max_tokens": 8, "temperature": 0}),
    ],
    ids=["sampled", "cut by its length", "failed"],
)
def test_what_is_not_kept(cache: ResponseCache, ending: Ending, request_: dict[str, Any]) -> None:
    with FakeServer(Reply(["a"], ending=ending)) as server, caching(server, cache) as client:
        for _ in range(2):
            with pytest.raises(ServerFailed) if ending is Ending.ERROR else nullcontext():
                assert client.generate("Hi", **request_).stats.cached is None
        assert len(server.requests) == 2


def test_opting_out(cache: ResponseCache) -> None:
    with FakeServer(Reply(["a"])) as server, caching(server, cache) as client:
        client.generate("Hi", max_tokens=8, temperature=0, cache=False)
        assert cache.backend.usage().entries == 0
        client.generate("Hi", max_tokens=8, temperature=0)
        assert client.generate("Hi", max_tokens=8, temperature=0, cache=False).stats.cached is None
        assert len(server.requests) == 3


def test_equal_requests_share_one_generation(cache: ResponseCache) -> None:
    texts: list[str] = []
    with FakeServer(Reply(["a", "b", "c"], delay_s=0.05)) as server, caching(server, cache) as client:

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
    with FakeServer(Reply(["a", "b", "c"], delay_s=0.05)) as server, caching(server, cache) as client:
        with client.stream("Hi", max_tokens=8, temperature=0) as first:
            next(first)
            second = client.stream("Hi", max_tokens=8, temperature=0).__enter__()
        assert "".join(chunk.text for chunk in second) == "abc"
        assert second.stats.cached == Cached("shared")
        second.__exit__(None, None, None)
        assert len(server.requests) == 1
        assert client.generate("Hi", max_tokens=8, temperature=0).stats.cached == Cached("exact")


def test_an_interrupt_ends_the_answer(cache: ResponseCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a chunk is awaited: the stream can be cancelled and left, and the server stops."""

    def interrupted(self: Future[object], timeout: float | None = None) -> object:  # noqa: ARG001
        assert server.requests[0].finished.wait(0.2) is False
        raise KeyboardInterrupt

    with (
        FakeServer(Reply(["a"], ending=Ending.HANG)) as server,
        caching(server, cache) as client,
        client.stream("Hi", max_tokens=8, temperature=0) as stream,
    ):
        next(stream)
        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        monkeypatch.undo()
        stream.cancel()
    assert server.requests[0].cancelled.wait(5)
    assert stream.text == "a"


@pytest.mark.parametrize("cached", [True, False])
def test_closing_the_client_ends_its_streams(cache: ResponseCache, cached: bool) -> None:
    with FakeServer(Reply(["a"], ending=Ending.HANG)) as server, caching(server, cache) as client:
        with client.stream("Hi", max_tokens=8, temperature=0, cache=cached) as stream:
            next(stream)
            threading.Timer(0.1, client.close).start()
            with pytest.raises(Cancelled):
                next(stream)
        assert server.requests[0].cancelled.wait(5)
        with pytest.raises(RuntimeError, match="closed"):
            client.generate("Hi", max_tokens=8)


def test_headers_of_the_callers_context_are_sent(cache: ResponseCache) -> None:
    with FakeServer() as server, caching(server, cache) as client:
        token = request_headers.set((("traceparent", "00-1-2-01"),))
        client.generate("Hi", max_tokens=8, temperature=0)
        request_headers.reset(token)
    assert server.requests[0].headers["traceparent"] == "00-1-2-01"


def test_when_everybody_left_the_server_stops(cache: ResponseCache) -> None:
    async def leave(url: str) -> None:
        async with AsyncClient(url) as plain:
            client = AsyncCachingClient(plain, cache, ORIGIN)
            async with client.stream("Hi", max_tokens=8, temperature=0) as stream:
                await anext(stream)

    with FakeServer(Reply(["a", "b"], delay_s=5)) as server:
        asyncio.run(leave(server.url))
        assert server.requests[0].cancelled.wait(5)
    assert cache.backend.usage().entries == 0


def test_a_failure_reaches_all(cache: ResponseCache) -> None:
    async def fail(url: str) -> list[object]:
        async with AsyncClient(url) as plain:
            client = AsyncCachingClient(plain, cache, ORIGIN)
            answers = [client.generate("Hi", max_tokens=8, temperature=0) for _ in range(3)]
            return await asyncio.gather(*answers, return_exceptions=True)

    with FakeServer(Reply(["a"], ending=Ending.ERROR, first_delay_s=0.05)) as server:
        assert {type(error) for error in asyncio.run(fail(server.url))} == {ServerFailed}
        assert len(server.requests) == 1
    assert cache.backend.usage().entries == 0
