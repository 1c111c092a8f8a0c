"""A server of OpenAI's API that follows a script by a clock of its own, and knows what a client must have seen.

Client and server share an event loop whose clock stands still while either has something to do, and jumps to the next
timer when both wait. A stall of five seconds takes none, and what is measured does not depend on the machine.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from pipeline.bench import load, targets

_DELIVERY_S = 0.003  # of real time that bytes on the loopback interface may take


class _Waiting(selectors.DefaultSelector):
    """Waits for sockets; where there is nothing to do until a timer ends, its time passes at once."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(_DELIVERY_S if timeout else timeout)
        if not found and timeout:
            self.now_s += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.waiting = _Waiting()
        super().__init__(self.waiting)

    def time(self) -> float:
        return self.waiting.now_s


@contextmanager
def own_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Yield a function that runs a coroutine by a clock that needs no time; the load generator reads it, too."""
    loop = _Loop()
    clock = SimpleNamespace(perf_counter=loop.time, thread_time=lambda: 0.0)
    with monkeypatch.context() as patch:
        for module in (load, targets):
            patch.setattr(module, "time", clock)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            yield runner.run


@dataclass(frozen=True)
class Chunk:
    """One event of an answer.

    Attributes:
        wait_s: Time since the event before, or since the request.
        text: Its text; empty for one without content.
        tokens: Tokens that the server counts in it.
        more: Further keys of the event.
        split: Bytes after which the rest waits for `split_s`.
    """

    wait_s: float
    text: str = " word"
    tokens: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)
    split: int = 0
    split_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        chunks: Its events.
        usage: Whether the last event tells the tokens.
        ends: done; early, without [DONE]; or cut, by closing the connection within an event.
        status: HTTP status; anything but 200 sends `body` alone.
        body: Body of a refusal.
    """

    chunks: tuple[Chunk, ...] = ()
    usage: bool = True
    ends: str = "done"
    status: int = 200
    body: str = ""


@dataclass
class Truth:
    """One request as the server saw it: seconds of its clock."""

    body: dict[str, Any]
    came_s: float
    answer: Answer
    chunks_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.answer.chunks)


@dataclass
class ScriptedOpenAI:
    """The server: `script` makes the answer to the n-th request."""

    script: Callable[[int, dict[str, Any]], Answer]
    models: tuple[str, ...] = ("llama",)
    requests: list[Truth] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> Any:
        """Context in which it answers at `url`."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": model} for model in self.models]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        now = asyncio.get_running_loop().time
        came_s, body = now(), await request.json()
        answer = self.script(len(self.requests), body)
        truth = Truth(body, came_s, answer)
        self.requests.append(truth)
        if answer.status != 200:
            return web.Response(status=answer.status, text=answer.body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in answer.chunks:
            await asyncio.sleep(chunk.wait_s)
            data = _event({"choices": [{"index": 0, "delta": {"content": chunk.text}}], **chunk.more})
            await response.write(data[: chunk.split])
            if chunk.split:
                await asyncio.sleep(chunk.split_s)
            await response.write(data[chunk.split :])
            truth.chunks_s += [now()] if chunk.text else []
        truth.ended_s = now()
        if answer.ends == "cut":
            await response.write(b'data: {"choices": [{"del')
            assert request.transport is not None
            request.transport.close()
        elif answer.ends == "done":
            usage = {"prompt_tokens": 5, "completion_tokens": truth.tokens}
            await response.write(_event({"choices": [], "usage": usage}) if answer.usage else b"")
            await response.write(b"data: [DONE]\n\n")
        return response


def _event(content: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()
