"""State that workers of one gateway share: limits in shared memory, and the coordinator of their requests."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.client.testing import Reply
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.settings import GatewaySettings
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.workers.coordinator import Coordinator
from pipeline.gateway.workers.link import SharedUsage
from tests.support.scripted_model import Upstream

LOST_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 40), st.floats(0, 20), st.booleans()), min_size=1, max_size=30
)


@given(STEPS)
def test_workers_together_allow_what_one_process_would(steps: list[tuple[int, int, float, bool]]) -> None:
    clock, limits = Clock(), TenantLimits(requests_per_minute=6, tokens_per_minute=90, concurrency=3)

    def tenant() -> Tenant:
        return Tenant("shop", limits, clock)

    alone, of_workers = tenant(), [tenant() for _ in range(3)]
    usage = SharedUsage.create(Tenants({"": tenant()}), 3)
    for number, worker in enumerate(of_workers):
        SharedUsage(usage.descriptor, Tenants({"": worker}), 3).share(number)

    entered: list[AsyncExitStack] = []

    async def ask(tenant: Tenant, tokens: int, *, stays: bool) -> str | None:
        try:
            await tenant.count_request()
            async with AsyncExitStack() as block:
                await block.enter_async_context(tenant.enforce_limits(tokens))
                if stays:
                    entered.append(block.pop_all())
        except ApiError as error:
            return f"{error.message} {error.retry_after_s or 0:.6f}"
        return None

    async def ask_all() -> None:
        for worker, tokens, pause_s, stays in steps:
            clock.now += pause_s
            said = await ask(of_workers[worker], tokens, stays=stays)
            assert said == await ask(alone, tokens, stays=stays)
            assert {worker.running for worker in of_workers} == {alone.running}
        # When workers are gone, nothing of theirs runs any more.
        for number in range(3):
            usage.forget(number)
        assert of_workers[0].running == 0

    asyncio.run(ask_all())
    os.close(usage.descriptor)


class Told:
    """The parent's end of a link, which keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, op: str, **fields: Any) -> None:
        self.messages.append(json.loads(json.dumps({"op": op, **fields})))

    def last(self, op: str) -> dict[str, Any]:
        return next((message for message in reversed(self.messages) if message["op"] == op), {})


def test_while_workers_are_at_two_packages_requests_wait_unless_both_can_be_asked() -> None:
    status = {"fault": None, "stale": None, "replaced_requests": 1, "running": 0, "waiting": 0, "stalled": 0}

    async def run() -> None:
        coordinator, links = Coordinator(GatewaySettings(max_waiting=8)), [Told(), Told()]
        for number, link in enumerate(links):
            coordinator.attach(number, link)  # type: ignore[arg-type]

        def say(number: int, op: str, **fields: Any) -> None:
            coordinator.receive(number, {"op": op, **fields})

        def watch(number: int, key: str, server: Upstream, slots: int) -> None:
            say(
                number, "watch", key=key, model="tiny", urls=[server.url], entry="tensorrt_llm_bls", slots=slots,
                slots_per_server=None,
            )  # fmt: skip

        def report(number: int, url: str) -> None:
            models = {"tiny": {"deployment": url, "endpoints": [url], **status}}
            say(number, "report", models=models, chunks={})

        def readiness(number: int) -> dict[str, Any]:
            return links[number].last("readiness")

        async def until(holds: Any) -> None:
            async with asyncio.timeout(LOST_S):
                while not holds():
                    await asyncio.sleep(0.01)

        def ask(number: int, lease: int) -> None:
            say(
                number, "acquire", lease=lease, model="tiny", tokens=1, tenant="", wait_s=LOST_S, arrived=0.0,
                background=False,
            )  # fmt: skip

        with Upstream(Reply()) as new, Upstream(Reply()) as old:
            for number in (0, 1):
                watch(number, "old", old, slots=2)
                report(number, "old")
            await until(lambda: readiness(1).get("fault", "") is None)
            ask(0, 1)
            await until(lambda: links[0].last("granted"))
            # One worker goes over. Both packages can be asked.
            watch(0, "new", new, slots=1)
            await until(lambda: readiness(0).get("probed") and readiness(0)["key"] == "new")
            say(0, "activate", key="new")
            say(0, "unwatch", key="old")
            report(0, "new")
            assert coordinator.status().models["tiny"].deployment == "old"
            assert coordinator.status().models["tiny"].replaced_requests == 2
            assert coordinator.status().models["tiny"].fault is None
            old.stop()
            # The other one is still at what cannot be asked any more.
            await until(lambda: coordinator.status().models["tiny"].fault)
            ask(0, 2)
            say(0, "release", lease=1)
            await asyncio.sleep(0)
            assert links[0].last("granted")["lease"] == 1
            watch(1, "new", new, slots=1)
            say(1, "activate", key="new")
            report(1, "new")
            await until(lambda: links[0].last("granted")["lease"] == 2)
            assert coordinator.status().models["tiny"].deployment == "new"
            # Of a worker that is gone, the place is free.
            ask(1, 7)
            coordinator.detach(0)
            await until(lambda: links[1].last("granted"))
            coordinator.detach(1)
            await coordinator.aclose()

    asyncio.run(run())
