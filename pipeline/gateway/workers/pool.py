"""The parent of the workers of a gateway: starts them, watches them, starts them again, and ends them together.

The listening sockets are the parent's, and inherited: a connection that no worker has accepted waits in them, whatever
becomes of a worker. A worker that is killed takes its own connections with it and no others; one that is stopped, or
does not report while it computes nothing, is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvloop

from pipeline.errors import ServerError
from pipeline.gateway.settings import GatewayStart, WorkerPlace
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.workers.coordinator import Coordinator
from pipeline.gateway.workers.link import LinkMessage, SharedUsage, WorkerLink
from pipeline.gateway.workers.worker import REPORT_S
from pipeline.keeper import RestartPolicy
from pipeline.process_state import ProcessPulse, ProcessStat, exit_reason

_log = logging.getLogger("pipeline.gateway")

_BACKLOG = 2048
_START_S = 120.0
_RESTARTS = RestartPolicy()
_REMEMBERED_FAILURES = 16
_SPARE_S = 5.0  # for workers to end after their drain


@dataclass(slots=True)
class _WorkerProcess:
    """A worker that runs: its process, whether it has begun to listen, and whether it goes on reporting."""

    process: asyncio.subprocess.Process
    pulse: ProcessPulse
    listens: bool = False
    began: float = field(default_factory=time.monotonic)


class WorkerPool:
    """The workers of one gateway."""

    def __init__(
        self,
        start: GatewayStart,
        sockets: Sequence[socket.socket],
        command: Sequence[str],
        tenants: Tenants,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            start: the gateway's; each worker gets it with its place.
            sockets: bound; workers inherit them under the same numbers.
            command: command line of a worker; the descriptor with its `GatewayStart` follows.
            tenants: tenants of `start.settings.keys`, whose limits workers share.
            on_ready: called when all workers listen for the first time.
        """
        self._start, self._sockets, self._command, self._on_ready = start, sockets, command, on_ready
        self._count = start.settings.workers
        self._usage = SharedUsage.create(tenants, self._count)
        self._coordinator = Coordinator(start.settings)
        self._running: dict[int, _WorkerProcess] = {}
        self._failure: ServerError | None = None

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C.

        Raises:
            ServerError: a worker did not start.
        """
        for listening in self._sockets:
            listening.listen(_BACKLOG)
        with (
            tempfile.TemporaryFile() as keys,
            _own_folder() as folder,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            settings = self._start.settings
            if settings.keys is not None:
                # A worker that is started again must know the same tenants.
                keys.write(settings.keys.read_bytes())
                keys.flush()
                settings = settings.model_copy(update={"keys": Path(f"/dev/fd/{keys.fileno()}")})
            sockets = tuple(listening.fileno() for listening in self._sockets)
            self._inherited = (*sockets, keys.fileno())
            self._start = self._start.model_copy(
                update={"settings": settings, "sockets": sockets, "parent": os.getpid()}
            )
            runner.run(self._run(folder))
        if self._failure is not None:
            raise self._failure

    async def _run(self, metrics: Path) -> None:
        self._stopping, self._all_listen = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupted() -> None:
            self._stopping.set()
            # A second Ctrl-C ends this process at once, and the workers with it.
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        loop.add_signal_handler(signal.SIGINT, interrupted)
        keepers = [asyncio.create_task(self._keep(number, metrics)) for number in range(self._count)]
        watching = asyncio.create_task(self._watch())
        await self._stopping.wait()
        watching.cancel()
        for listening in self._sockets:
            listening.close()
        for worker in self._running.values():
            self._signal(worker, signal.SIGTERM)
        _, late = await asyncio.wait(keepers, timeout=self._start.settings.drain_s + _SPARE_S)
        for worker in self._running.values():
            self._signal(worker, signal.SIGKILL)
        if late:
            await asyncio.wait(late)
        await self._coordinator.aclose()

    async def _keep(self, number: int, metrics: Path) -> None:
        """Run worker `number`, again and again, until the pool stops."""
        failures: deque[float] = deque(maxlen=_REMEMBERED_FAILURES)
        while not self._stopping.is_set():
            try:
                why = exit_reason(await self._serve(number, metrics))
            except OSError as error:
                why = f"cannot be started: {error.strerror}"
            if self._stopping.is_set():
                return
            if not self._all_listen.is_set():
                self._failure = ServerError(f"worker {number} of the gateway {why} before it was ready")
                self._stopping.set()
                return
            failures.append(time.monotonic())
            pause_s = _RESTARTS.pause_before_restart(failures, failures[-1])
            _log.error("worker %d of the gateway %s; it is started again", number, why)
            self._coordinator.restarts += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def _serve(self, number: int, metrics: Path) -> int:
        """Run worker `number` once. Returns its exit code."""
        own_end, child_end = socket.socketpair()
        with child_end:
            place = WorkerPlace(
                number=number,
                workers=self._count,
                link=child_end.fileno(),
                usage=self._usage.descriptor,
                metrics=metrics,
            )
            message = self._start.model_copy(update={"worker": place}).to_descriptor()
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(message),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(*self._inherited, place.link, place.usage, message),
                    # Ctrl-C is for the parent, which tells its workers.
                    start_new_session=True,
                )
            finally:
                os.close(message)
        worker = self._running[number] = _WorkerProcess(process, ProcessPulse(process.pid))
        link = await WorkerLink.over(own_end, partial(self._receive, number, worker), lambda: None)
        self._coordinator.attach(number, link)
        if self._stopping.is_set():
            self._signal(worker, signal.SIGTERM)
        try:
            return await process.wait()
        finally:
            del self._running[number]
            link.close()
            self._coordinator.detach(number)
            self._usage.forget(number)

    def _receive(self, number: int, worker: _WorkerProcess, message: LinkMessage) -> None:
        if self._running.get(number) is not worker:
            return
        if message["op"] == "listens":
            worker.listens = True
            _log.info("worker %d of the gateway is process %d", number, worker.process.pid)
            everybody = len(self._running) == self._count and all(
                process.listens for process in self._running.values()
            )
            if everybody and not self._all_listen.is_set():
                self._all_listen.set()
                self._on_ready()
        if message["op"] == "report" and worker.listens:
            worker.pulse.ask()
        self._coordinator.receive(number, message)

    async def _watch(self) -> None:
        """Kill workers that hang; `_keep` starts them again."""
        while True:
            await asyncio.sleep(REPORT_S)
            for number, worker in self._running.items():
                why = worker.pulse.fault()
                if why is None and not worker.listens and time.monotonic() - worker.began > _START_S:
                    why = f"does not listen within {_START_S:g} s"
                if why is not None:
                    _log.error("worker %d of the gateway %s", number, why)
                    self._signal(worker, signal.SIGKILL)

    @staticmethod
    def _signal(worker: _WorkerProcess, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(number)


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A private folder for what workers share in files; those of gateways that were killed are removed."""
    prefix = "pipeline-workers-"
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if ProcessStat.of(int(old.name.split("-")[2])) is None:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-") as folder:
        yield Path(folder)
