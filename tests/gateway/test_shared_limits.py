"""Limits of a minute that several gateways share in Redis or Valkey, and what becomes of them while it is away."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import pytest

from pipeline.cache.backend import PASSWORD
from pipeline.cache.redis_server import RedisAddress
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.shared_redis import BucketTake, RedisBuckets
from tests.gateway.conftest import Running, Start, keyed
from tests.support.http_clients import http
from tests.support.servers import RedisServer, Unavailable
from tests.support.waiting import wait_for

KEY = {"Authorization": "Bearer k"}
FALLBACKS = "pipeline_limits_fallbacks_total"
# A machine may be as slow as it likes: of so few a minute, none comes back meanwhile.
FEW = TenantLimits(requests_per_minute=4)
# For an answer: no matter how busy the machine is, a server that is there is in time.
PATIENT_S = 20.0


def nobody() -> RedisAddress:
    """An address that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return RedisAddress("127.0.0.1", taken.getsockname()[1])


def ask(running: Running) -> httpx.Response:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4}
    return http.post(f"{running.url}/v1/completions", json=body, headers=KEY, timeout=60)


def test_without_the_server_each_gateway_counts_by_itself_and_says_so(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    address = nobody()
    gateways = [start(tenants=keyed("k", limits=FEW), buckets=RedisBuckets(address)) for _ in range(2)]
    assert [running.metric(FALLBACKS) for running in gateways] == [0, 0]
    began = time.monotonic()
    for running in gateways:
        statuses = [ask(running).status_code for _ in range(5)]
        # One a quarter of a minute may have come back.
        allowed = 4 + int((time.monotonic() - began) / 15)
        assert statuses[:4] == [200] * 4
        assert statuses.count(200) <= allowed
        assert running.metric(FALLBACKS) >= 5
    told = [message for message in caplog.messages if "counted by this gateway alone" in message]
    assert len(told) == 2, "once a gateway"
    assert str(address) in told[0]


def test_nobody_without_limits_asks_the_server(start: Start) -> None:
    running = start(tenants=keyed("k"), buckets=RedisBuckets(nobody()))
    assert ask(running).status_code == 200
    assert running.metric(FALLBACKS) == 0
    # Who has one that is shared is not kept waiting by its absence.
    running = start(tenants=keyed("k", limits=TenantLimits(concurrency=1)), buckets=RedisBuckets(nobody()))
    assert [ask(running).status_code for _ in range(2)] == [200, 200]
    assert running.metric(FALLBACKS) > 0


@contextmanager
def served(kind: str, *options: str) -> Iterator[RedisServer]:
    try:
        server = RedisServer(kind, options=options)
    except Unavailable as error:
        pytest.skip(f"no server of {kind} here: {error}")
    with server:
        yield server


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with served(request.param) as running:
        yield running


Work = Callable[[list[RedisBuckets]], Any]


def with_buckets(server: RedisServer, gateways: int, work: Work) -> None:
    """Run a coroutine with the buckets of so many gateways."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            all_ = [
                RedisBuckets(RedisAddress.parse(server.url), timeout_s=PATIENT_S) for _ in range(gateways)
            ]
            for gateway in all_:
                stack.push_async_callback(gateway.aclose)
            await work(all_)

    asyncio.run(run())


@pytest.mark.servers
def test_many_gateways_at_once_allow_what_one_would(server: RedisServer) -> None:
    limits = TenantLimits(requests_per_minute=60)

    async def work(buckets: list[RedisBuckets]) -> None:
        shops = [Tenant("shop", limits) for _ in buckets]
        for shop, shared in zip(shops, buckets, strict=True):
            shop.shared = shared
        other = Tenant("other", limits)
        other.shared = buckets[0]

        waits: list[float] = []

        async def asked(shop: Tenant) -> int:
            allowed = 0
            for _ in range(30):
                try:
                    await shop.count_request()
                    allowed += 1
                except ApiError as error:
                    waits.append(error.retry_after_s or 0.0)
            return allowed

        began = time.monotonic()
        allowed = sum(await asyncio.gather(*(asked(shop) for shop in shops for _ in range(3))))
        assert 60 <= allowed <= 60 + (time.monotonic() - began) + 1
        assert all(0 < wait_s <= 60 for wait_s in waits)
        # Nobody takes from another tenant.
        await other.count_request()
        assert 58 < float(dict(other.rate_limit_headers())[b"x-ratelimit-remaining-requests"]) < 60

    with_buckets(server, 4, work)


@pytest.mark.servers
def test_all_is_taken_or_nothing_and_what_is_refused_is_charged_to_a_minute_at_most(
    server: RedisServer,
) -> None:
    def take(requests: float, tokens: float) -> list[BucketTake]:
        return [BucketTake("requests", 10, requests), BucketTake("tokens", 600, tokens)]

    async def work(buckets: list[RedisBuckets]) -> None:
        one, second = buckets
        first = await one.take("t", take(1, 500))
        assert first is not None
        assert [state.wait_s for state in first] == [0, 0]
        refused = await second.take("t", take(1, 600))
        assert refused is not None
        assert refused[0].wait_s == 0
        assert 0 < refused[1].wait_s <= 50
        assert refused[0].level >= 9, "nothing was taken"
        forced = await second.take("t", take(0, 1_000_000)[1:], forced=True)
        assert forced is not None
        assert -600 <= forced[0].level < -500
        # More than a minute's worth is let in when all is there, and is owed.
        owed = await one.take("u", [BucketTake("tokens", 600, 6000)])
        assert owed is not None
        assert (owed[0].wait_s, round(owed[0].level)) == (0, -5400)

    with_buckets(server, 2, work)
    import redis

    client = redis.Redis(port=server.port, protocol=2)
    # Until all would be full again, and not for ever.
    assert 100_000 < client.pttl("pipeline:limits:t") <= 121_000
    assert 500_000 < client.pttl("pipeline:limits:u") <= 602_000
    client.close()


async def admitted(tenant: Tenant, stack: AsyncExitStack, choices: int = 1) -> bool:
    """Whether a request may run; it does until the stack ends."""
    try:
        await stack.enter_async_context(tenant.enforce_limits(1, choices))
    except ApiError as error:
        if error.code != "concurrency_limit":
            raise
        return False
    return True


async def eventually(work: Callable[[], Any]) -> None:
    """Until it is true; a machine may take its time."""
    async with asyncio.timeout(60):
        while not await work():
            await asyncio.sleep(0.02)


@pytest.mark.servers
def test_gateways_together_run_as_many_requests_of_a_tenant_as_one_would(server: RedisServer) -> None:
    limits = TenantLimits(concurrency=5, tokens_per_minute=1000)

    async def work(buckets: list[RedisBuckets]) -> None:
        shops = [Tenant("shop", limits) for _ in buckets]
        for shop, shared in zip(shops, buckets, strict=True):
            shop.shared = shared
        async with AsyncExitStack() as running:
            asked = [admitted(shop, running) for shop in shops for _ in range(4)]
            assert sum(await asyncio.gather(*asked)) == 5
            # Nothing is charged for what was refused.
            await shops[0].charge_tokens(1)
            left = float(dict(shops[0].rate_limit_headers())[b"x-ratelimit-remaining-tokens"])
            assert left >= 1000 - 5 - 1 - 1
        async with AsyncExitStack() as running:
            await eventually(lambda: admitted(shops[2], running, choices=4))
            assert not await admitted(shops[0], running, choices=2)
            with pytest.raises(asyncio.CancelledError):
                async with shops[0].enforce_limits(1):
                    raise asyncio.CancelledError
        # Whatever ended, in whatever way, is given back: all of it can be had again.
        async with AsyncExitStack() as running:
            await eventually(lambda: admitted(shops[0], running, choices=5))

    with_buckets(server, 3, work)


@pytest.mark.servers
def test_requests_of_a_gateway_that_dies_end_with_their_leases_and_those_of_others_are_renewed(
    server: RedisServer,
) -> None:
    import redis

    address = RedisAddress.parse(server.url)

    async def run() -> None:
        dead = RedisBuckets(address, timeout_s=PATIENT_S, lease_s=2.0)
        alive, other = (RedisBuckets(address, timeout_s=PATIENT_S) for _ in range(2))
        shops = [Tenant("shop", TenantLimits(concurrency=2)) for _ in range(3)]
        for shop, shared in zip(shops, (dead, alive, other), strict=True):
            shop.shared = shared
        async with AsyncExitStack() as running:
            dies = AsyncExitStack()
            assert await admitted(shops[0], dies)
            # It renews nothing, and gives nothing back.
            assert dead._renewing is not None
            dead._renewing.cancel()
            assert await admitted(shops[1], running)
            until = dict(client.zrange("pipeline:running:shop", 0, -1, withscores=True))
            await eventually(lambda: admitted(shops[2], running))
            assert not await admitted(shops[2], running), "the other's still counts"

            async def renewed() -> bool:
                now = dict(client.zrange("pipeline:running:shop", 0, -1, withscores=True))
                return any(now.get(name, 0) > score for name, score in until.items())

            await eventually(renewed)
        for gateway in (dead, alive, other):
            await gateway.aclose()
        await dies.aclose()  # too late to give anything back

    client = redis.Redis(port=server.port, protocol=2)
    asyncio.run(run())
    assert client.zcard("pipeline:running:shop") <= 1, "whoever ended has given back"
    client.close()


@pytest.mark.servers
def test_without_the_server_each_gateway_counts_its_own_requests_at_once(server: RedisServer) -> None:
    async def work(buckets: list[RedisBuckets]) -> None:
        shops = [Tenant("shop", TenantLimits(concurrency=2)) for _ in buckets]
        for shop, shared in zip(shops, buckets, strict=True):
            shop.shared = shared
        server.stop()
        async with AsyncExitStack() as running:
            assert [await admitted(shop, running) for shop in shops for _ in range(3)] == [
                True,
                True,
                False,
            ] * 2

    with_buckets(server, 2, work)


@pytest.mark.servers
def test_gateways_share_limits_and_fall_back_while_the_server_hangs_or_is_gone(
    server: RedisServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    limits = TenantLimits(requests_per_minute=6)
    address = RedisAddress.parse(server.url)
    gateways = [start(tenants=keyed("k", limits=limits), buckets=RedisBuckets(address)) for _ in range(2)]

    def exhausted(running: Running) -> bool:
        return ask(running).status_code == 429

    began = time.monotonic()
    statuses = [ask(gateways[at % 2]).status_code for at in range(10)]
    if not any(running.metric(FALLBACKS) for running in gateways):
        # Else the machine was so busy that a server which is there was late.
        assert 6 <= statuses.count(200) <= 6 + (time.monotonic() - began) / 10 + 1
    server.pause()
    for running in gateways:
        before = running.metric(FALLBACKS)
        answer = ask(running)
        assert answer.status_code in (200, 429), "never a failed request"
        wait_for(lambda: ask(running) and running.metric(FALLBACKS) > before, "counted by itself")  # noqa: B023
    server.resume()
    wait_for(lambda: ask(gateways[0]) and "shared again" in caplog.text, "shared again", 60)
    server.stop()
    assert ask(gateways[1]).status_code in (200, 429)
    server.start()
    caplog.clear()
    wait_for(lambda: ask(gateways[1]) and "shared again" in caplog.text, "shared again", 60)
    # A server that was started again knows nothing: the buckets are full.
    wait_for(lambda: exhausted(gateways[0]), "a limit", 60)


@pytest.mark.servers
def test_a_password_and_a_server_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with served("redis", "--requirepass", "open sesame") as server:

        async def refused(buckets: list[RedisBuckets]) -> None:
            assert await buckets[0].take("t", [BucketTake("requests", 4, 1)]) is None

        async def taken(buckets: list[RedisBuckets]) -> None:
            assert await buckets[0].take("t", [BucketTake("requests", 4, 1)]) is not None

        monkeypatch.delenv(PASSWORD, raising=False)
        with_buckets(server, 1, refused)
        monkeypatch.setenv(PASSWORD, "open sesame")
        with_buckets(server, 1, taken)
