"""Messages between a worker of the gateway and its parent: JSON objects, one a line, over a socket pair."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from socket import socket
from typing import Any, cast

# {"op": what is meant, …}
LinkMessage = Mapping[str, Any]

_encode = json.JSONEncoder(separators=(",", ":")).encode


class WorkerLink(asyncio.Protocol):
    """One end of the socket pair. Messages arrive in the order in which they were sent."""

    def __init__(self, receive: Callable[[LinkMessage], None], lost: Callable[[], None]) -> None:
        """
        Args:
            receive: is called with each message.
            lost: is called once when the other process is gone.
        """
        self._receive, self._lost = receive, lost
        self._transport: asyncio.Transport | None = None
        self._begun = b""  # of a message that is not complete

    @classmethod
    async def over(
        cls, end: socket, receive: Callable[[LinkMessage], None], lost: Callable[[], None]
    ) -> WorkerLink:
        """Open a link on one end of a socket pair, in the running event loop."""
        end.setblocking(False)
        _, link = await asyncio.get_running_loop().create_connection(lambda: cls(receive, lost), sock=end)
        return link

    def send(self, op: str, **fields: Any) -> None:
        """Send a message. After the other process is gone, nothing happens."""
        if self._transport is not None:
            self._transport.write(_encode({"op": op, **fields}).encode() + b"\n")

    def close(self) -> None:
        """Send what is under way, and close."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self._receive(json.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._lost()
