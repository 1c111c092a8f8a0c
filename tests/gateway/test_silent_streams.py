"""Signs of life in streams that are silent for long, so that no proxy cuts them off."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.client.testing import Ending, Received, Reply
from pipeline.gateway.api import model_answer
from pipeline.gateway.api.sse import WriteCoalescer
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http_client

MESSAGES = [{"role": "user", "content": "Where is my parcel?"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Once"},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
}
SIGNS = {"/v1/messages": 'event: ping\ndata: {"type":"ping"}'}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign of life after 50 ms of silence."""
    monkeypatch.setattr(model_answer, "KEEP_ALIVE_S", 0.05)


def stream(
    running: Running, path: str, until: Callable[[str], bool], on_sign: Callable[[], None] = lambda: None
) -> tuple[int, list[str], bool]:
    """Status and events of a stream until they are enough, and whether it says where the answer comes from.

    `on_sign` is called when the first sign of life has come.
    """
    body = {"model": "tiny", "stream": True, **BODIES[path]}
    deadline, read = time.monotonic() + 30, ""
    with (
        http_client(timeout=30) as client,
        client.stream("POST", running.url + path, json=body) as answer,
    ):
        for piece in answer.iter_text():
            if not read:
                on_sign()
            read += piece
            assert time.monotonic() < deadline, read
            if until(read):
                break
    assert until(read), read
    return answer.status_code, read.split("\n\n"), "x-cache" in answer.headers


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("path", BODIES)
def test_neither_a_long_prefill_nor_a_pause_between_tokens_is_silent(borrow: Start, path: str) -> None:
    sign = SIGNS.get(path, ": keep-alive")
    begun = threading.Event()

    def reply(_: Received) -> Reply:
        begun.wait(60)
        return Reply(["early"], ending=Ending.HANG)

    status, events, told = stream(
        borrow(reply), path, lambda read: sign in read.partition("early")[2], begun.set
    )
    assert (status, told, events[0]) == (200, False, sign)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("path", BODIES)
def test_what_fails_after_a_sign_of_life_is_an_event(start: Start, path: str) -> None:
    running = start(Reply([], ending=Ending.HANG), max_wait_s=0.2)
    status, events, _ = stream(running, path, lambda read: '"error"' in read, running.upstream.stop)
    assert (status, events[0]) == (200, SIGNS.get(path, ": keep-alive"))
    data = next(event for event in events if '"error"' in event).partition("data: ")[2]
    assert json.loads(data)["error"]["message"]


def test_an_answer_that_comes_in_time_has_no_sign_of_life(borrow: Start) -> None:
    status, events, told = stream(
        borrow(Reply(["soon"])), "/v1/chat/completions", lambda read: "[DONE]" in read
    )
    assert (status, told, ": keep-alive" in events) == (200, True, False)


def test_a_body_that_waits_for_its_reader_gets_no_sign_of_life() -> None:
    """Silence is broken where nothing was sent, not where nothing is read."""
    sent: list[bytes] = []
    reads = asyncio.Event()

    async def send(message: Any) -> None:
        await reads.wait()
        sent.append(message["body"])

    async def work() -> None:
        async with WriteCoalescer(send, keep_alive=b":", keep_alive_s=0.01) as body:
            putting = asyncio.ensure_future(body.put(b"first"))
            await asyncio.sleep(0.1)
            assert not sent
            reads.set()
            await putting
            while sent[-1:] != [b":"]:
                await asyncio.sleep(0.01)
        assert sent[0] == b"first"
        assert set(sent[1:]) <= {b":", b""}

    asyncio.run(asyncio.wait_for(work(), 30))
