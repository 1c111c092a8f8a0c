"""What tenants have used of their limits, counted by all workers in one memory.

A request takes from the buckets of its tenant at once and without asking another process: the memory is mapped by all,
and locked for a few microseconds while it is changed. The lock is the kernel's (`fcntl`): it is free again when the
process that holds it is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from types import TracebackType
from typing import Any

from pipeline.gateway.limits import TenantUsage
from pipeline.gateway.tenants import Tenants

_NUMBER_BYTES = 8


class SharedUsage:
    """Memory with the numbers of each tenant that has limits, for a number of workers."""

    def __init__(self, descriptor: int, tenants: Tenants, workers: int) -> None:
        """
        Args:
            descriptor: of the file that `create` made, and that this process inherited.
            tenants: the same as in all other processes.
            workers: how many there are.
        """
        self.descriptor, self._tenants, self._workers = descriptor, tenants.limited, workers
        self._size = TenantUsage.size(workers)
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._numbers: memoryview[Any] = memoryview(memory).cast("d")
        self._lock = _FileLock(descriptor)

    @classmethod
    def create(cls, tenants: Tenants, workers: int) -> SharedUsage:
        """Make the memory, with what the tenants have used so far."""
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, max(1, len(tenants.limited)) * TenantUsage.size(workers) * _NUMBER_BYTES)
        made = cls(descriptor, tenants, workers)
        for number, tenant in enumerate(tenants.limited):
            for at, value in enumerate(tenant.usage.cells):
                made._of(number)[at] = value
        return made

    def share(self, worker: int) -> None:
        """Let all tenants of this process count in this memory from now on, as worker `worker`."""
        for number, tenant in enumerate(self._tenants):
            tenant.share(TenantUsage(self._of(number), worker, self._lock))

    def forget(self, worker: int) -> None:
        """Count nothing any more as running in a worker, which is gone."""
        with self._lock:
            for number in range(len(self._tenants)):
                TenantUsage(self._of(number)).forget_process(worker)

    def _of(self, number: int) -> Any:
        return self._numbers[number * self._size : (number + 1) * self._size]


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
