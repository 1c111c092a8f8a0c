"""A package served in the foreground, by processes of this machine or by a container, until it is told to stop.

It is announced in `<store>/running/` while it answers, so that clients find it by the name of its recipe, and checked
by real inference all the while: Triton reports itself ready even when the process of a model is dead.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ServerError, UserError
from pipeline.progress import Progress
from pipeline.serving.server import Stopped, TritonServer
from pipeline.triton.layout import ENTRY
from pipeline.triton.running import RunningServer

_POLL_S = 0.2
_FAILURES_IN_A_ROW = 3  # a server under load may be late once


@dataclass(frozen=True, slots=True)
class LocalDeployment:
    """One recipe's package and the server for it."""

    name: str  # of the recipe
    package: Path
    server: TritonServer
    running: Path | None  # folder where it is announced; None: nowhere
    progress: Progress
    # Waits until all files of the package are verified; False if they are not, or the server is to stop.
    verified: Callable[[], bool] = lambda: True
    # Words that name it for `stream` and `chat`; empty: they are given its address.
    recipe: tuple[str, ...] = ()
    on_ready: Callable[[], None] = lambda: None  # called once, after warm-up
    on_ill: Callable[[], None] = lambda: None  # called when a health check fails, and at the end

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
        self.progress.say(
            f"starting Triton for {self.name} from {self.package}, for at most {self.server.start_deadline_s:.0f} s"
        )
        with contextlib.suppress(Stopped), self.server.until(stop) as server:
            warm = server.warmup()
            if not self.verified():
                raise Stopped("the package was not verified")
            record = RunningServer.of(server, self.package)
            self.announce(record)
            try:
                self.progress.say(
                    f"ready after {time.monotonic() - start:.1f} s: gRPC {server.grpc_url}, HTTP {server.http_url}, "
                    f"metrics {server.metrics_url}\n"
                    f"  models: {', '.join(server.models)}; clients talk to {server.entry_model}\n"
                    f"  first token of a short prompt, warm: {warm.first_s * 1000:.1f} ms; log: {server.log_file}\n"
                    f'  ask: pipeline stream {self._words} "…"   talk: pipeline chat {self._words}   stop: Ctrl-C'
                )
                self.on_ready()
                self._watch(stop, health_interval_s)
            finally:
                self.on_ill()
                if self.running is not None:
                    record.remove(self.running, self.name)
        self.progress.say(f"stopped Triton for {self.name}")

    def announce(self, record: RunningServer) -> None:
        """Let clients find the server by its recipe's name, where the folder for that can be written."""
        if self.running is None:
            return
        try:
            record.write(self.running, self.name)
        except OSError as error:
            # Its store is only read.
            self.progress.say(
                f"{self.running} cannot be written ({error.strerror}): clients find this server by its --url only"
            )

    @property
    def _words(self) -> str:
        """What a client's command line finds this server by."""
        if self.recipe:
            return shlex.join(self.recipe)
        deployment = self.server.deployment
        tokenizer = str(self.package.absolute() / deployment.tokenizer_dir)
        model = () if deployment.entry_model == ENTRY else ("--model", deployment.entry_model)
        return shlex.join(("--url", self.server.grpc_url, "--tokenizer", tokenizer, *model))

    def _refuse_a_second(self) -> None:
        running = RunningServer.read(self.running, self.name) if self.running is not None else None
        if running is not None and running.alive:
            raise UserError(
                f"{self.name} is served already by process {running.pid} at {running.grpc_url}; stop that first"
            )

    def _watch(self, stop: threading.Event, health_interval_s: float) -> None:
        failures, next_check = 0, time.monotonic() + health_interval_s
        while not stop.wait(_POLL_S):
            if not self.server.running:
                raise ServerEnded(self.server.wait(), self.server.log_tail())
            if not health_interval_s or time.monotonic() < next_check:
                continue
            next_check = time.monotonic() + health_interval_s
            try:
                self.server.check_health()
                if failures:
                    self.on_ready()
                failures = 0
            except ServerError as error:
                failures += 1
                self.on_ill()
                if failures == _FAILURES_IN_A_ROW:
                    raise
                self.progress.say(f"health check {failures} of {_FAILURES_IN_A_ROW} failed: {error}")


class ServerEnded(ServerError):
    """A server that was ready has ended by itself."""

    def __init__(self, code: int, log_tail: list[str]) -> None:
        self.code = code  # 128 + signal, if a signal ended it
        super().__init__(
            "\n".join([f"Triton ended by itself with exit code {code}; the end of its log:", *log_tail])
        )
