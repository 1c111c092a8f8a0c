"""The asyncio client with a cache in front, against a scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cache.client import AsyncCachingClient
from pipeline.cache.key import Origin
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.sqlite import SqliteBackend
from pipeline.client import AsyncClient, Cached, ServerFailed
from pipeline.client.testing import Ending, FakeServer, Reply

ORIGIN = Origin("package")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ResponseCache]:
    cache = ResponseCache(SqliteBackend(tmp_path / "cache.db"))
    yield cache
    cache.close()


def test_a_second_request_is_answered_by_the_same_chunks(cache: ResponseCache) -> None:
    async def twice(url: str) -> list[tuple[list[str], Cached | None]]:
        seen = []
        async with AsyncClient(url) as plain:
            client = AsyncCachingClient(plain, cache, ORIGIN)
            for _ in range(2):
                async with client.stream("Hi", max_tokens=8, temperature=0) as stream:
                    texts = [chunk.text async for chunk in stream]
                    seen.append((texts, stream.stats.cached))
        return seen

    with FakeServer(Reply(["Hel", "lo ", "you"])) as server:
        first, second = asyncio.run(twice(server.url))
        assert len(server.requests) == 1
    assert first == (["Hel", "lo ", "you", ""], None)
    assert second == (["Hel", "lo ", "you", ""], Cached("exact"))


def test_equal_requests_share_one_generation(cache: ResponseCache) -> None:
    async def eight(url: str) -> list[str]:
        async with AsyncClient(url) as plain:
            client = AsyncCachingClient(plain, cache, ORIGIN)
            answers = [client.generate("Hi", max_tokens=8, temperature=0) for _ in range(8)]
            return [answer.text for answer in await asyncio.gather(*answers)]

    with FakeServer(Reply(["a", "b", "c"], delay_s=0.02)) as server:
        assert asyncio.run(eight(server.url)) == ["abc"] * 8
        assert len(server.requests) == 1


def test_the_first_caller_may_leave(cache: ResponseCache) -> None:
    async def leave(url: str) -> tuple[str, Cached | None]:
        async with AsyncClient(url) as plain:
            client = AsyncCachingClient(plain, cache, ORIGIN)
            async with client.stream("Hi", max_tokens=8, temperature=0) as first:
                await anext(first)
                second = await client.stream("Hi", max_tokens=8, temperature=0).__aenter__()
            text = "".join([chunk.text async for chunk in second])
            await second.__aexit__(None, None, None)
            return text, second.stats.cached

    with FakeServer(Reply(["a", "b", "c"], delay_s=0.05)) as server:
        assert asyncio.run(leave(server.url)) == ("abc", Cached("shared"))
        assert len(server.requests) == 1
    assert cache.backend.usage().entries == 1


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
