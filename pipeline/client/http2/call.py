"""One call: the messages that have come for it, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote

import grpc
from grpc.aio import AioRpcError, Metadata

from pipeline.client.http2.frames import Code

EOF: Final = grpc.aio.EOF  # after the last message
PREFIX_BYTES = 5  # of each message: compressed or not, and its length
WINDOW = 4 * 2**20  # bytes of a stream that may be under way or unread; a longer message is taken as it comes
Status = grpc.StatusCode

_STATUSES = {status.value[0]: status for status in Status}
_OF_RESET = {
    Code.REFUSED_STREAM: Status.UNAVAILABLE,
    Code.CANCEL: Status.CANCELLED,
    Code.ENHANCE_YOUR_CALM: Status.RESOURCE_EXHAUSTED,
    Code.INADEQUATE_SECURITY: Status.PERMISSION_DENIED,
}
_OF_HTTP = {
    "400": Status.INTERNAL, "401": Status.UNAUTHENTICATED, "403": Status.PERMISSION_DENIED,
    "404": Status.UNIMPLEMENTED, "429": Status.UNAVAILABLE, "502": Status.UNAVAILABLE, "503": Status.UNAVAILABLE,
    "504": Status.UNAVAILABLE,
}  # fmt: skip


class Call:
    """Read by one task. What a reader leaves unread holds the server back, by the window of its stream."""

    def __init__(self, block: bytes, request: bytes, decode: Callable[[bytes], Any]) -> None:
        """`block`: its headers, encoded; `request`: the message that is sent, `decode`: of those that come."""
        self.block = block
        self.unsent = memoryview(b"\x00" + len(request).to_bytes(4, "big") + request)
        self.send_window = 0  # bytes that the server still takes of this stream
        self.on_cancel: Callable[[], None] = lambda: None
        self.on_room: Callable[[int], None] = lambda _: None  # so many bytes more may come
        self._decode = decode
        self._messages: deque[bytes] = deque()
        self._unread = 0  # bytes in `_messages`
        self._part = b""  # of a message
        self._taken = 0  # bytes that came since `on_room`
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        self._error: AioRpcError | None = None
        self._headers: dict[str, str] = {}

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self._over

    async def read(self) -> Any:
        """The next message; EOF at the end. AioRpcError if the call failed."""
        if self._messages:
            await asyncio.sleep(0)  # a reader that finds one each time would keep the loop to itself
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._over:
                return EOF
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        self._unread -= len(message)
        self._make_room()
        return self._decode(message)

    def cancel(self) -> None:
        """Nobody wants the rest."""
        if not self._over:
            self.fail(Status.CANCELLED, "the call was cancelled")
            self.on_cancel()

    def data(self, content: bytes) -> None:
        """What a DATA frame brings: a message as a rule; parts of messages, or several, are as good."""
        self._taken += len(content)
        if self._part:
            content = self._part + content
        at, end = 0, len(content)
        while end - at >= PREFIX_BYTES:
            begin = at + PREFIX_BYTES
            size = int.from_bytes(content[at + 1 : begin], "big")
            if content[at]:
                self.fail(Status.INTERNAL, "a message is compressed, though that was not asked for")
                self.on_cancel()
                return
            if end - begin < size:
                break
            at = begin + size
            self._messages.append(content[begin:at])
            self._unread += size
        self._part = content[at:]
        self._make_room()
        self._wake()

    def headers(self, fields: Mapping[str, str], *, last: bool) -> None:
        """The headers, or with `last` those that end the stream and tell how the call went."""
        self._headers |= fields
        if last:
            self.ended()

    def ended(self) -> None:
        """The server has nothing more to say."""
        http, number = self._headers.get(":status", ""), self._headers.get("grpc-status", "")
        if number == "0" and not self._part:
            self._finish(None)
        elif number.isdecimal() and number != "0":
            status = _STATUSES.get(int(number), Status.UNKNOWN)
            self.fail(status, unquote(self._headers.get("grpc-message", "")))
        elif http != "200":
            self.fail(_OF_HTTP.get(http, Status.UNKNOWN), f"HTTP status {http or 'missing'}")
        else:
            self.fail(
                Status.INTERNAL, "the server ended the call in the middle of a message or without a status"
            )

    def reset(self, code: int) -> None:
        """The server broke the stream off; after a complete answer that says nothing."""
        status = next((status for known, status in _OF_RESET.items() if known == code), Status.INTERNAL)
        self.fail(status, f"the server reset the stream (error {code})")

    def fail(self, status: grpc.StatusCode, details: str) -> None:
        """It ends here, unless it has."""
        self._finish(AioRpcError(status, Metadata(), Metadata(), details=details))

    def _finish(self, error: AioRpcError | None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _make_room(self) -> None:
        if self._taken >= WINDOW // 2 and self._unread <= WINDOW // 2 and not self._over:
            taken, self._taken = self._taken, 0
            self.on_room(taken)
