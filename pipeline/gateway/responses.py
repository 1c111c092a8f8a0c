"""Sends what a completion says, whole or as events, and gives it up when nobody reads it any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pipeline.client import ClientError
from pipeline.gateway.access_log import Track
from pipeline.gateway.completions import Completion
from pipeline.gateway.errors import ApiError, as_api_error
from pipeline.gateway.metrics import Metrics
from pipeline.gateway.sse import event
from pipeline.gateway.write_coalescer import Outbox, ReaderTooSlow


class Noted:
    """What is noted of a completion when it is over."""

    def __init__(self, completion: Completion, metrics: Metrics, track: Track) -> None:
        self.completion = completion
        self._metrics, self._track = metrics, track

    @property
    def cache(self) -> str:
        """Where the answer comes from: miss, exact, shared, or semantic with the similarity."""
        cached = self.completion.cached
        if cached is None:
            return "miss"
        return f"semantic; similarity={cached.similarity:.4f}" if cached.kind == "semantic" else cached.kind

    def refused(self, error: Exception) -> ApiError:
        """What is told of an error."""
        told = as_api_error(error)
        self._track.error = told.message
        return told

    def left(self, why: str) -> None:
        """Whoever asked does not get the whole answer."""
        self._track.error = why

    def over(self, status: int) -> None:
        """Count its tokens; the line of the log gets its figures."""
        job, name = self.completion.job, self.completion.job.served.name
        self._track.outcome = status
        stats = list(job.stats.values())
        self._metrics.observe_completion(name, job.prompt_tokens, stats)
        ttft_ms = [one.ttft_ms for one in stats if one.ttft_ms is not None]
        cached = self.completion.cached
        self._track.fields |= {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": sum(one.output_tokens or 0 for one in stats),
            "ttft_ms": round(min(ttft_ms), 1) if ttft_ms else None,
            "cached": cached.kind if cached else None,
        }


async def whole(request: Request, noted: Noted) -> Response:
    """The whole answer; given up when the asker leaves."""
    work = asyncio.ensure_future(noted.completion.whole())
    gone = asyncio.ensure_future(_disconnected(request.receive))
    status = 499
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=status)  # nobody reads it
        body, status = work.result(), 200
    except (ApiError, ClientError, ExceptionGroup) as error:
        told = noted.refused(error)
        status = told.status
        raise told from error
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.wait([work, gone])
        noted.over(status)
    return JSONResponse(body, headers={"x-cache": noted.cache})


class Events(Response):
    """The answer as events. The status waits for the first of them, so that what is refused is told by its status."""

    def __init__(self, noted: Noted) -> None:
        self._noted = noted
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with while_read(receive):
            await self._send(scope, receive, send)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, request_id = 499, scope["track"].id
        try:
            async with aclosing(self._noted.completion.events()) as events:
                try:
                    first = await anext(events)
                except (ApiError, ClientError, ExceptionGroup) as error:
                    told = self._noted.refused(error)
                    status = told.status
                    await told.response(request_id)(scope, receive, send)
                    return
                await send({"type": "http.response.start", "status": 200, "headers": self._head()})
                async with Outbox(send, scope.get("peer")) as outbox:
                    await outbox.put(first)
                    try:
                        async for body in events:
                            await outbox.put(body)
                        ended = 200
                    except (ApiError, ClientError, ExceptionGroup) as error:
                        told = self._noted.refused(error)
                        ended = told.status
                        await outbox.put(event(told.body(request_id)))
                status = ended
        except ReaderTooSlow as error:
            if "peer" not in scope:
                raise
            self._noted.left(str(error))
            scope["peer"].abort()
        finally:
            self._noted.over(status)

    def _head(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            (b"x-cache", self._noted.cache.encode()),
        ]


@asynccontextmanager
async def while_read(receive: Receive) -> AsyncIterator[None]:
    """The block ends early, and in silence, when the one who reads the answer leaves."""
    work = asyncio.current_task()
    assert work is not None
    gone = asyncio.ensure_future(_disconnected(receive))
    stop = lambda _: work.cancel()  # noqa: E731
    gone.add_done_callback(stop)
    try:
        yield
    except asyncio.CancelledError:
        if not gone.done() or work.uncancel():
            raise  # it is this task that is to end
    finally:
        gone.remove_done_callback(stop)
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
