"""A package served by a Triton process of this machine, in the foreground, until it is told to stop.

It is announced in `<store>/running/` while it answers, so that clients find it by the name of its recipe, and checked
by real inference all the while: Triton reports itself ready even when the process of a model is dead.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ServerError, UserError
from pipeline.progress import Progress
from pipeline.store import Store
from pipeline.triton.running import RunningServer
from pipeline.triton.server import TritonServer

_POLL_S = 0.2
_FAILURES_IN_A_ROW = 3  # a server under load may be late once


@dataclass(frozen=True, slots=True)
class LocalDeployment:
    """One recipe's package and the server for it."""

    name: str  # of the recipe
    package: Path
    server: TritonServer
    store: Store
    progress: Progress

    def run(self, stop: threading.Event, *, health_interval_s: float) -> None:
        """Start, announce, watch until `stop` is set, and end everything.

        Args:
            health_interval_s: time between health checks; 0 makes none.

        Raises:
            UserError: a server for this recipe runs already. ServerError: Triton did not start, died, or stopped
            answering.
        """
        self._refuse_a_second()
        start = time.monotonic()
        self.progress.say(f"starting Triton for {self.name} from {self.package}")
        with self.server as server:
            warm = server.warmup()
            record = RunningServer.of(server, self.package)
            record.write(self.store.running, self.name)
            try:
                self.progress.say(
                    f"ready after {time.monotonic() - start:.1f} s: gRPC {server.grpc_url}, HTTP {server.http_url}, "
                    f"metrics {server.metrics_url}\n"
                    f"  models: {', '.join(server.models)}; clients talk to {server.entry_model}\n"
                    f"  first token of a short prompt, warm: {warm.first_s * 1000:.1f} ms; log: {server.log_file}\n"
                    f'  ask: pipeline stream {self.name} "…"   talk: pipeline chat {self.name}   stop: Ctrl-C'
                )
                self._watch(stop, health_interval_s)
            finally:
                record.remove(self.store.running, self.name)
        self.progress.say(f"stopped Triton for {self.name}")

    def _refuse_a_second(self) -> None:
        running = RunningServer.read(self.store.running, self.name)
        if running is not None and running.alive:
            raise UserError(
                f"{self.name} is served already by process {running.pid} at {running.grpc_url}; stop that first"
            )

    def _watch(self, stop: threading.Event, health_interval_s: float) -> None:
        failures, next_check = 0, time.monotonic() + health_interval_s
        while not stop.wait(_POLL_S):
            if not self.server.running:
                raise ServerError(
                    "\n".join(["Triton ended by itself; the end of its log:", *self.server.log_tail()])
                )
            if not health_interval_s or time.monotonic() < next_check:
                continue
            next_check = time.monotonic() + health_interval_s
            try:
                self.server.check_health()
                failures = 0
            except ServerError as error:
                failures += 1
                if failures == _FAILURES_IN_A_ROW:
                    raise
                self.progress.say(f"health check {failures} of {_FAILURES_IN_A_ROW} failed: {error}")
