"""Both faces of the client for one test: the blocking one, and the asyncio one behind the same blocking methods."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self

import grpc
import pytest

from pipeline.client import AsyncClient, Chunk, Client

# Seconds for anything that a test awaits.
TIMEOUT_S = 60


class LoopClient:
    """An `AsyncClient` with the methods of a `Client`."""

    def __init__(self, *urls: Any, **settings: Any) -> None:
        self.client = AsyncClient(*urls, **settings)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_S)

    def generate(self, *prompt: Any, **request: Any) -> Any:
        return self.run(self.client.generate(*prompt, **request))

    def model(self) -> Any:
        return self.run(self.client.model())

    def stream(self, *prompt: Any, **request: Any) -> LoopStream:
        return LoopStream(self, self.client.stream(*prompt, **request))

    def close(self) -> None:
        self.run(self.client.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(TIMEOUT_S)
        self.loop.close()


class LoopStream:
    """An `AsyncStream` with the methods of a `Stream`."""

    def __init__(self, client: LoopClient, stream: Any) -> None:
        self._client, self._stream = client, stream

    def __enter__(self) -> Self:
        self._client.run(self._stream.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._client.run(self._stream.__aexit__(*_))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        async def step() -> Chunk | None:
            return await anext(self._stream, None)

        if (chunk := self._client.run(step())) is None:
            raise StopIteration
        return chunk  # type: ignore[no-any-return]

    def cancel(self) -> None:
        self._client.loop.call_soon_threadsafe(self._stream.cancel)

    def status(self) -> grpc.StatusCode:
        return self._client.run(self._stream._call.code())  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def status_of(stream: Any) -> grpc.StatusCode:
    """Return how the call of a stream ended."""
    return stream.status() if isinstance(stream, LoopStream) else stream._call.code()  # type: ignore[no-any-return]


both_faces = pytest.mark.parametrize("face", [Client, LoopClient])
