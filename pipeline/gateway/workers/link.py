"""Link between workers of the gateway and their parent: messages over a socket pair, and memory with limits of tenants.

Messages are JSON objects, one a line. A request takes from the buckets of its tenant at once and without asking another
process: the memory is mapped by all, and locked for a few microseconds while it is changed. The lock is the kernel's
(`fcntl`): it is free again when the process that holds it is killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from socket import socket
from types import TracebackType
from typing import Any, cast

from pipeline.gateway.limits import TenantUsage
from pipeline.gateway.tenants import Tenants

# {"op": what is meant, …}
LinkMessage = Mapping[str, Any]

_encode = json.JSONEncoder(separators=(",", ":")).encode


class WorkerLink(asyncio.Protocol):
    """One end of the socket pair. Messages arrive in the order in which they were sent."""

    def __init__(self, receive: Callable[[LinkMessage], None], lost: Callable[[], None]) -> None:
        """`receive` is called with each message, `lost` once when the other process is gone."""
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


class SharedUsage:
    """Memory with the usage of each tenant that has limits, for a number of workers."""

    def __init__(self, descriptor: int, tenants: Tenants, workers: int) -> None:
        """`descriptor` is the file that `create` made; `tenants` are the same in all processes."""
        self.descriptor, self._tenants, self._workers = descriptor, tenants.limited, workers
        self._memory = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        self._lock = _FileLock(descriptor)

    @classmethod
    def create(cls, tenants: Tenants, workers: int) -> SharedUsage:
        """Make the memory, with what the tenants have used so far."""
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, max(1, len(tenants.limited)) * TenantUsage.size(workers))
        usage = cls(descriptor, tenants, workers)
        for number, tenant in enumerate(tenants.limited):
            usage._usage(number).copy_levels(tenant.usage)
        return usage

    def share(self, worker: int) -> None:
        """Let all tenants of this process count in this memory from now on, as worker `worker`."""
        for number, tenant in enumerate(self._tenants):
            tenant.share(self._usage(number, worker))

    def forget(self, worker: int) -> None:
        """Count nothing any more as running in a worker, which is gone."""
        with self._lock:
            for number in range(len(self._tenants)):
                self._usage(number).forget_process(worker)

    def _usage(self, number: int, worker: int = 0) -> TenantUsage:
        size = TenantUsage.size(self._workers)
        return TenantUsage(self._memory[number * size : (number + 1) * size], worker, self._lock)


class _FileLock:
    """Holds a lock on a file among processes; for one thread of each."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
