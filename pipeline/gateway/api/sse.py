"""Server-sent events: encoding chunks with as little work a token as possible, and writing to a client until it leaves.

Written against OpenAI's streaming format (`data: {…}` events, ended by `data: [DONE]`) and ASGI 3. A stream that is
silent for long gets a sign of life, also before its first event: proxies cut connections off that are.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Protocol, Self

from starlette.types import Message, Receive, Send

DONE = b"data: [DONE]\n\n"
# A comment, which clients leave out.
KEEP_ALIVE = b": keep-alive\n\n"
# Proxies cut off connections that are silent for 60 s, some of them earlier.
KEEP_ALIVE_S = 15.0

# Between two writes of a stream: so much for each stream that is open, because a write costs about 20 µs of the
# processor, and those of all streams should not take more than a tenth of a core.
_GAP_PER_STREAM_S = 0.0002
_MIN_GAP_S, _MAX_GAP_S = 0.001, 0.01
_WRITE_BYTES = 64 * 1024
_MAX_UNREAD_BYTES = 4 * 2**20
_MAX_WAIT_S = 10.0

# JSON of a string and of any value; non-ASCII characters are kept as they are.
encode_text = json.encoder.encode_basestring
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def encode_event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """Encode any JSON object as one event, which may have a name."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {encode_json(value)}\n\n".encode()


class ChunkEncoder:
    """Encodes the chunks of one completion. What is the same in every chunk is encoded once."""

    def __init__(self, head: Mapping[str, Any], *, chat: bool) -> None:
        """`head`: fields of every chunk (id, object, …); `chat`: whether text is in `delta.content` or in `text`."""
        self._head = encode_json(head)[:-1]
        self._chat = chat
        self._prefixes: dict[int, str] = {}  # by choice
        self._suffix = ("}" if chat else "") + ',"logprobs":null,"finish_reason":null}]}\n\n'

    def text(self, index: int, text: str) -> bytes:
        """Encode new text of choice `index`."""
        prefix = self._prefixes.get(index)
        if prefix is None:
            key = '"delta":{"content":' if self._chat else '"text":'
            prefix = f'data: {self._head},"choices":[{{"index":{index},{key}'
            self._prefixes[index] = prefix
        return f"{prefix}{encode_text(text)}{self._suffix}".encode()

    def choice(self, index: int, **fields: Any) -> bytes:
        """Encode any chunk of a choice: the first, the last, or one with log probabilities."""
        choice = {"index": index, **fields}
        return f'data: {self._head},"choices":[{encode_json(choice)}]}}\n\n'.encode()

    def end(self, **fields: Any) -> bytes:
        """Encode a chunk without choices, such as the usage."""
        fields_json = encode_json(fields)[1:]
        return f'data: {self._head},"choices":[],{fields_json}\n\n'.encode()


class Peer(Protocol):
    """The connection on which a response goes out."""

    @property
    def congested(self) -> bool:
        """Whether the next write has to wait for the client to read."""

    def abort(self) -> None:
        """End the connection now, whatever has not been read."""


class ReaderTooSlow(Exception):
    """A client left more unread than is buffered for it, for longer than the gateway waits."""

    def __init__(self) -> None:
        super().__init__("the answer was not read as fast as it came")


class WriteCoalescer:
    """Body of one streamed response, as an async context manager.

    The first event goes out at once, and so does every other one that comes a millisecond or more after the last write
    (up to ten, if many streams are open); events that come faster go out together, because a write costs more than a
    token.

    The model does not wait for the client: what it generates is buffered here, so that its slot in the engine is free
    as soon as the generation ends. A client that leaves too much unread for too long is given up.

    On leaving the block without an error, everything has been sent and the body is complete, or what sending raised is
    raised. A response that has not begun then is not begun.

    Attributes:
        begun: whether the response has begun, by an event or a sign of life.
    """

    _open = 0  # of this process

    def __init__(
        self,
        send: Send,
        peer: Peer | None = None,
        *,
        start: Callable[[], Message] | None = None,
        keep_alive: bytes = b"",
        keep_alive_s: float = KEEP_ALIVE_S,
        max_unread_bytes: int = _MAX_UNREAD_BYTES,
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        """
        Args:
            send: ASGI's `send`.
            peer: the client's connection; without it, sending is taken never to block.
            start: makes the message that is sent before the body; None: it was sent.
            keep_alive: sign of life, which is sent after each `keep_alive_s` seconds of silence; empty: none is.
            max_unread_bytes: size of the buffer; beyond it, `put` waits for the client.
            max_wait_s: most seconds that all calls of `put` together wait.
        """
        self._send, self._peer, self._loop = send, peer, asyncio.get_running_loop()
        self._start, self._keep_alive, self._keep_alive_s = start, keep_alive, keep_alive_s
        self._max_unread_bytes, self._wait_left_s = max_unread_bytes, max_wait_s
        self.begun = self._flushing = False
        self._bodies: deque[bytes] = deque()
        self._unread_bytes = 0
        self._next_write = self._loop.time()  # not before; shortly after the last one
        self._silence: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._has_room = asyncio.Event()

    async def put(self, body: bytes) -> None:
        """Send a piece of the body, now or within some milliseconds.

        Raises:
            ReaderTooSlow: the client leaves too much unread, for too long.
        """
        self._append(body)
        if self._writing is not None:
            while self._unread_bytes > self._max_unread_bytes and not self._writing.done():
                await self._wait_for_room()
            if not self._writing.done():
                return
            self._raise_from_writing()
        if self._timer is None:
            if self._loop.time() < self._next_write:
                self._timer = self._loop.call_at(self._next_write, self._on_timer)
            elif self._peer is not None and self._peer.congested:
                self._start_writing()
            else:
                await self._flush()

    @property
    def has_room(self) -> bool:
        """Whether `put_now` may be called: the response has begun, and the client reads as fast as the answer comes."""
        return self.begun and not self._must_wait()

    def put_now(self, body: bytes) -> None:
        """Send a piece of the body as `put` does, without waiting for anything, where there is room."""
        self._append(body)
        if self._timer is not None:
            return
        if self._loop.time() < self._next_write:
            self._timer = self._loop.call_at(self._next_write, self._on_timer)
        else:
            self._on_timer()

    async def __aenter__(self) -> Self:
        if self._keep_alive:
            self._silence = self._loop.call_later(self._keep_alive_s, self._break_silence)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._silence is not None:
            self._silence.cancel()
        WriteCoalescer._open -= self.begun
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            if kind is not None:
                self._writing.cancel()
            await asyncio.wait([self._writing])
        if kind is None and (self.begun or self._start is None):
            self._raise_from_writing()
            await self._send({"type": "http.response.body", "body": b"".join(self._bodies)})

    def _append(self, body: bytes) -> None:
        if not self.begun:
            self.begun = True
            WriteCoalescer._open += 1
        self._bodies.append(body)
        self._unread_bytes += len(body)

    def _break_silence(self) -> None:
        """Send a sign of life if nothing was sent for so long, and nothing waits to be."""
        due, now = self._next_write + self._keep_alive_s, self._loop.time()
        if now >= due:
            due = now + self._keep_alive_s
            if not (self._bodies or self._flushing or self._timer or self._writing_failed()):
                self._append(self._keep_alive)
                self._start_writing()
        self._silence = self._loop.call_at(due, self._break_silence)

    def _writing_failed(self) -> bool:
        writing = self._writing
        return (
            writing is not None
            and writing.done()
            and (writing.cancelled() or writing.exception() is not None)
        )

    async def _wait_for_room(self) -> None:
        began = self._loop.time()
        self._has_room.clear()
        try:
            async with asyncio.timeout(self._wait_left_s):
                await self._has_room.wait()
        except TimeoutError:
            raise ReaderTooSlow() from None
        finally:
            self._wait_left_s -= self._loop.time() - began

    def _on_timer(self) -> None:
        self._timer = None
        if self._must_wait():
            self._start_writing()
            return
        # Nothing has to be waited for, so that a task is not needed.
        writing = self._flush()
        try:
            writing.send(None)
        except StopIteration:
            return
        except Exception as error:
            # As if a task had failed with it.
            self._writing = self._loop.create_future()
            self._writing.set_exception(error)
            return
        writing.close()
        raise RuntimeError("sending waits, though the connection is not congested")

    def _must_wait(self) -> bool:
        """Whether sending what is unread may have to wait for the client."""
        return (
            self._writing is not None
            or self._peer is None
            or self._peer.congested
            or self._unread_bytes > _WRITE_BYTES
        )

    def _start_writing(self) -> None:
        self._writing = self._loop.create_task(self._flush())

    def _raise_from_writing(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    async def _flush(self) -> None:
        self._flushing = True
        try:
            if self._start is not None:
                start, self._start = self._start(), None
                await self._send(start)
            while self._bodies:
                parts, size = [], 0
                while self._bodies and size < _WRITE_BYTES:
                    parts.append(self._bodies.popleft())
                    size += len(parts[-1])
                await self._send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
                self._unread_bytes -= size
                self._has_room.set()
                gap_s = min(max(_MIN_GAP_S, _GAP_PER_STREAM_S * WriteCoalescer._open), _MAX_GAP_S)
                self._next_write = self._loop.time() + gap_s
        finally:
            # If sending failed, `put` must not wait for it any longer.
            self._has_room.set()
            self._flushing = False


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client leaves, and go on after it without an error."""
    work = asyncio.current_task()
    assert work is not None
    gone = asyncio.ensure_future(wait_for_disconnect(receive))
    cancel = lambda _: work.cancel()  # noqa: E731
    gone.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        # If the client is still there, or somebody else cancelled besides, the task itself is to end.
        if not gone.done() or work.uncancel():
            raise
    finally:
        gone.remove_done_callback(cancel)
        gone.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
