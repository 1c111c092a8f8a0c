"""One connection that carries any number of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import grpc
import hpack

from pipeline.client.channel import KeepAlive
from pipeline.client.http2.call import WINDOW, Call
from pipeline.client.http2.fields import Fields
from pipeline.client.http2.frames import (
    ACK,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    PREFACE,
    Code,
    Frame,
    Kind,
    Malformed,
    Reader,
    Setting,
    frame,
    header_frames,
    read_settings,
    reset,
    settings,
    unpadded,
    window_update,
)

_UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE
_PING = b"pipeline"


class Connection(asyncio.Protocol):
    """Made by `loop.create_connection`; calls may begin when `ready` is done."""

    def __init__(self, keep_alive: KeepAlive) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = (
            self._loop.create_future()
        )  # the server has said how it wants to be asked
        self.on_room: Callable[[], None] = lambda: None  # a call more may begin
        self._keep_alive = keep_alive
        self._calls: dict[int, Call] = {}
        self._unwritten: list[bytes] = []
        self._reader, self._fields = Reader(), Fields()
        self._block: tuple[int, int, bytes] | None = None  # stream, flags and content of headers that go on
        self._next, self._closing = 1, False
        self._most, self._stream_window = MAX_WINDOW, DEFAULT_WINDOW  # what the server allows
        self._send_window, self._taken = DEFAULT_WINDOW, 0
        self._alarm: asyncio.TimerHandle | None = None
        self._heard_at = self._loop.time()

    @property
    def usable(self) -> bool:
        """Whether calls may still begin, now or later."""
        return not self._closing and self._next < MAX_WINDOW

    @property
    def has_room(self) -> bool:
        """Whether a call may begin now."""
        return self.usable and self.ready.done() and len(self._calls) < self._most

    def begin(self, call: Call) -> None:
        """Send a call."""
        stream, self._next = self._next, self._next + 2
        self._calls[stream] = call
        call.send_window = self._stream_window
        call.on_cancel = lambda: self._drop(stream)
        call.on_room = lambda size: self._write(window_update(stream, size))
        self._write(header_frames(stream, call.block) + self._sendable(stream, call))
        self._watch()

    def close(self, why: str = "the client is closed") -> None:
        """Calls under way are cancelled."""
        self._end(grpc.StatusCode.CANCELLED, why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        ours = {Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: WINDOW}
        self._write(PREFACE + settings(ours) + window_update(0, MAX_WINDOW - DEFAULT_WINDOW))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(_UNAVAILABLE, f"connection lost: {error}" if error else "the server closed the connection")

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for one in self._reader.feed(data):
                self._take(one)
        except (Malformed, hpack.HPACKError, IndexError) as error:
            self._end(_UNAVAILABLE, f"the server does not speak HTTP/2 as it should: {error}")
        if self._taken > MAX_WINDOW // 2:
            self._write(window_update(0, self._taken))
            self._taken = 0

    def _take(self, one: Frame) -> None:
        kind, flags, stream, payload = one
        if not self.ready.done() and kind != Kind.SETTINGS:
            raise Malformed("it does not begin with its settings")
        if kind == Kind.DATA:
            self._taken += len(payload)
            call = self._calls.get(stream)
            if call is not None:
                call.data(unpadded(kind, flags, payload) if flags & ~END_STREAM else payload)
                if flags & END_STREAM:
                    call.ended()
                    self._forget(stream)
        elif kind in (Kind.HEADERS, Kind.CONTINUATION):
            self._headers(kind, flags, stream, payload)
        elif kind == Kind.SETTINGS:
            if not flags & ACK:
                self._settings(read_settings(payload))
        elif kind == Kind.PING:
            if not flags & ACK:
                self._write(frame(Kind.PING, ACK, 0, payload))
        elif kind == Kind.WINDOW_UPDATE:
            self._widen(stream, int.from_bytes(payload, "big") & MAX_WINDOW)
        elif kind == Kind.RST_STREAM:
            if call := self._calls.get(stream):
                call.reset(int.from_bytes(payload, "big"))
                self._forget(stream)
        elif kind == Kind.GOAWAY:
            self._go_away(int.from_bytes(payload[:4], "big") & MAX_WINDOW, payload[8:])

    def _headers(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == Kind.HEADERS:
            self._block = stream, flags, unpadded(kind, flags, payload)
        elif self._block is not None and self._block[0] == stream:
            self._block = stream, self._block[1] | flags, self._block[2] + payload
        else:
            raise Malformed("headers go on that have not begun")
        if not flags & END_HEADERS:
            return
        (_, flags, block), self._block = self._block, None
        fields = self._fields.read(block)  # of every block: it has a state
        call, last = self._calls.get(stream), bool(flags & END_STREAM)
        if call is not None:
            call.headers(fields, last=last)
            if last:
                self._forget(stream)

    def _settings(self, given: dict[int, int]) -> None:
        self._most = given.get(Setting.MAX_CONCURRENT_STREAMS, self._most)
        window = given.get(Setting.INITIAL_WINDOW_SIZE, self._stream_window)
        for call in self._calls.values():
            call.send_window += window - self._stream_window
        self._stream_window = window
        self._write(frame(Kind.SETTINGS, ACK, 0))
        if not self.ready.done():
            self.ready.set_result(None)
        self._send_rest()

    def _widen(self, stream: int, size: int) -> None:
        if stream == 0:
            self._send_window += size
        elif call := self._calls.get(stream):
            call.send_window += size
        self._send_rest()

    def _send_rest(self) -> None:
        for stream, call in self._calls.items():
            if call.unsent and (data := self._sendable(stream, call)):
                self._write(data)

    def _sendable(self, stream: int, call: Call) -> bytes:
        """As much of a request as the server takes now, as frames."""
        frames = []
        while call.unsent:
            size = min(len(call.unsent), MAX_FRAME_BYTES, call.send_window, self._send_window)
            if size <= 0:
                break
            part, call.unsent = bytes(call.unsent[:size]), call.unsent[size:]
            call.send_window -= size
            self._send_window -= size
            frames.append(frame(Kind.DATA, 0 if call.unsent else END_STREAM, stream, part))
        return b"".join(frames)

    def _go_away(self, last: int, why: bytes) -> None:
        """The server takes nothing new, and has not taken what comes after `last`."""
        self._closing = True
        for stream in [stream for stream in self._calls if stream > last]:
            text = why.decode(errors="replace") or "it is going away"
            self._calls[stream].fail(_UNAVAILABLE, f"the server did not take the call: {text}")
            self._forget(stream)
        if not self._calls:
            self._hang_up()

    def _drop(self, stream: int) -> None:
        self._write(reset(stream, Code.CANCEL))
        self._forget(stream)

    def _forget(self, stream: int) -> None:
        if self._calls.pop(stream, None) is None:
            return
        if self._closing and not self._calls:
            self._hang_up()
        self.on_room()

    def _end(self, status: grpc.StatusCode, why: str) -> None:
        self._closing = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._hang_up()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(status, why)
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(why))
            self.ready.exception()  # whoever opened it may have left
        self.on_room()

    def _write(self, data: bytes) -> None:
        """Send at the end of this turn of the loop, with what else is sent in it: a write costs more than a call."""
        if not self._unwritten:
            self._loop.call_soon(self._write_all)
        self._unwritten.append(data)

    def _write_all(self) -> None:
        if self._unwritten and not self._transport.is_closing():
            self._transport.write(b"".join(self._unwritten))
        self._unwritten.clear()

    def _hang_up(self) -> None:
        self._write_all()
        self._transport.close()

    def _watch(self) -> None:
        """Ask after a server that is silent."""
        if self._alarm is None:
            self._alarm = self._loop.call_later(self._keep_alive.time_s, self._ask)

    def _ask(self) -> None:
        self._alarm = None
        if self._closing or not (self._calls or self._keep_alive.while_idle):
            return
        silent_s = self._loop.time() - self._heard_at
        if silent_s < self._keep_alive.time_s:
            self._alarm = self._loop.call_later(self._keep_alive.time_s - silent_s, self._ask)
            return
        self._write(frame(Kind.PING, 0, 0, _PING))
        asked_at = self._loop.time()

        def check() -> None:
            self._alarm = None
            if self._heard_at < asked_at:
                self._end(_UNAVAILABLE, f"no answer to a ping within {self._keep_alive.timeout_s:g} s")
                self._transport.abort()
            else:
                self._watch()

        self._alarm = self._loop.call_later(self._keep_alive.timeout_s, check)
