"""Serve a package until told to stop: checked against this machine, started, announced, watched, ended.

By processes of this machine, or by a container (`launch_*` has the commands, `server.TritonServer` the process). While
the server answers it is announced in `<store>/running/`, so that clients find it by the name of its recipe, and checked
by real inference: Triton reports itself ready even when the process of a model is dead.

How a Ctrl-C ends everything: `stop` is set, `_SupervisedServer.run` leaves its loop, `TritonServer.stop` ends
`machine/process_guard.py`, and that the processes of the server.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ServerError, UserError
from pipeline.machine.docker import find_image, pull_image
from pipeline.machine.host import mpi_slots
from pipeline.plan.preflight import Finding, finding_lines
from pipeline.progress import Progress, Silent, Task
from pipeline.serving.launch import Launcher, ServeOptions
from pipeline.serving.launch_docker import DockerLauncher
from pipeline.serving.launch_gpu import NativeLauncher
from pipeline.serving.preflight import check_container, check_local, refuse
from pipeline.serving.server import StartCancelled, TritonServer, local_launcher
from pipeline.store import FileHashes
from pipeline.triton.deployment import ENTRY, Deployment
from pipeline.triton.repository import check_package, check_without_weights
from pipeline.triton.running import RunningServer

_POLL_S = 0.2
_FAILURES_IN_A_ROW = 3  # a server under load may be late once


def serve(
    package: Path,
    options: ServeOptions,
    progress: Progress,
    stop: threading.Event,
    *,
    on_ready: Callable[[TritonServer], None] = lambda _: None,
    on_not_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve a package until `stop` is set.

    It is ready when it answers, and all its files are those that were built; weights that have to be read for that are
    read while they are loaded.

    Args:
        package: Folder with deployment.json and model_repository/.
        options: Ports, deadlines, target.
        progress: Where to report.
        stop: Ends the server when it is set, also while it starts.
        on_ready: Called after the warm-up, and when a health check succeeds again.
        on_not_ready: Called when a health check fails, and when the server is stopped after it was ready.

    Raises:
        InvalidInput: The machine does not fit; all reasons at once.
        UserError: The package cannot be served this way, or a server for this recipe runs already.
        DamagedArtifact: Files of the package are not those that were built.
        ServerError: The server did not start, died, or stopped answering.
    """
    check_without_weights(package, options.hashes, Silent())
    deployment = Deployment.load(package)
    launcher = _docker_launcher if options.target_of(deployment) == "docker" else _local_launcher
    server = TritonServer(
        deployment,
        launcher(deployment, package, options, progress),
        ports=options.ports,
        address=options.address,
        log_file=options.log_file,
        start_deadline_s=options.start_deadline_s,
        stop_deadline_s=options.stop_deadline_s,
    )
    verification = _Verification(package, options.hashes, progress, stop)
    supervised = _SupervisedServer(
        package,
        server,
        options,
        progress,
        verified=verification.passed,
        on_ready=on_ready,
        on_not_ready=on_not_ready,
    )
    verification.start()
    try:
        supervised.run(stop)
    except ServerError as error:
        # What is damaged may be why.
        if verification.failure is not None:
            raise verification.failure from error
        raise
    if verification.failure is not None:
        raise verification.failure


class ServerEnded(ServerError):
    """A server that was ready has ended by itself."""

    def __init__(self, code: int, log_tail: list[str]) -> None:
        self.code = code  # 128 + signal, if a signal ended it
        super().__init__(
            "\n".join([f"Triton ended by itself with exit code {code}; the end of its log:", *log_tail])
        )


@dataclass(frozen=True, slots=True)
class _SupervisedServer:
    """A server, announced and health-checked while it runs."""

    package: Path
    server: TritonServer
    options: ServeOptions
    progress: Progress
    # Waits until all files of the package are verified; False if they are not, or the server is to stop.
    verified: Callable[[], bool]
    on_ready: Callable[[TritonServer], None]
    on_not_ready: Callable[[], None]

    def run(self, stop: threading.Event) -> None:
        """Start, announce, watch until `stop` is set, and end everything. Raises what `serve` does."""
        name, running = self.server.deployment.name, self.options.running
        if running is not None:
            _refuse_a_second(running, name)
        start = time.monotonic()
        self.progress.say(
            f"starting Triton for {name} from {self.package}, for at most {self.server.start_deadline_s:.0f} s"
        )
        with contextlib.suppress(StartCancelled), self.server.until(stop) as server:
            warm = server.warmup()
            if not self.verified():
                raise StartCancelled("the package was not verified")
            record = RunningServer.of(server, self.package)
            if running is not None:
                announce(record, running, name, self.progress)
            try:
                self.progress.say(
                    f"ready after {time.monotonic() - start:.1f} s: gRPC {server.grpc_url}, HTTP {server.http_url}, "
                    f"metrics {server.metrics_url}\n"
                    f"  models: {', '.join(server.models)}; clients talk to {server.entry_model}\n"
                    f"  first token of a short prompt, warm: {warm.first_s * 1000:.1f} ms; log: {server.log_file}\n"
                    f'  ask: pipeline stream {self._words} "…"   talk: pipeline chat {self._words}   stop: Ctrl-C'
                )
                self.on_ready(server)
                self._watch(stop)
            finally:
                self.on_not_ready()
                if running is not None:
                    record.remove(running, name)
        self.progress.say(f"stopped Triton for {name}")

    @property
    def _words(self) -> str:
        """What names this server on a client's command line."""
        if self.options.recipe:
            return shlex.join(self.options.recipe)
        deployment = self.server.deployment
        tokenizer = str(self.package.absolute() / deployment.tokenizer_dir)
        model = () if deployment.entry_model == ENTRY else ("--model", deployment.entry_model)
        return shlex.join(("--url", self.server.grpc_url, "--tokenizer", tokenizer, *model))

    def _watch(self, stop: threading.Event) -> None:
        interval_s = self.options.health_interval_s
        failures, next_check = 0, time.monotonic() + interval_s
        while not stop.wait(_POLL_S):
            if not self.server.running:
                raise ServerEnded(self.server.wait(), self.server.log_tail())
            if not interval_s or time.monotonic() < next_check:
                continue
            next_check = time.monotonic() + interval_s
            try:
                self.server.check_health()
                if failures:
                    self.on_ready(self.server)
                failures = 0
            except ServerError as error:
                failures += 1
                self.on_not_ready()
                if failures == _FAILURES_IN_A_ROW:
                    raise
                self.progress.say(f"health check {failures} of {_FAILURES_IN_A_ROW} failed: {error}")


def announce(record: RunningServer, running: Path, name: str, progress: Progress) -> None:
    """Let clients find a server by its recipe's name, where the folder for that can be written."""
    try:
        record.write(running, name)
    except OSError as error:
        # Its store is only read.
        progress.say(
            f"{running} cannot be written ({error.strerror}): clients find this server by its --url only"
        )


def _refuse_a_second(running: Path, name: str) -> None:
    record = RunningServer.read(running, name)
    if record is not None and record.alive:
        raise UserError(
            f"{name} is served already by process {record.pid} at {record.grpc_url}; stop that first"
        )


class _Verification(threading.Thread):
    """Reads a package's files beside the start, and sets `stop` if they are not those that were built."""

    def __init__(self, package: Path, hashes: FileHashes, progress: Progress, stop: threading.Event) -> None:
        super().__init__(name="verify", daemon=True)
        self.failure: Exception | None = None
        self._package, self._hashes, self._progress, self._stop_serving = package, hashes, progress, stop

    def run(self) -> None:
        try:
            check_package(self._package, self._hashes, _UntilStopped(self._stop_serving))
        except StartCancelled:
            pass
        except Exception as error:
            # `serve` raises it.
            self.failure = error
            self._stop_serving.set()

    def passed(self) -> bool:
        """Wait for the end; whether all files are those that were built."""
        if self.is_alive():
            self._progress.say("it answers; it is ready when its weights have been verified, too")
        self.join()
        return not self._stop_serving.is_set()


@dataclass(frozen=True, slots=True)
class _UntilStopped(Silent):
    """Ends a task by raising StartCancelled when the event is set."""

    stop: threading.Event

    @contextlib.contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:  # noqa: ARG002
        yield self

    def advance(self, amount: float = 1) -> None:  # noqa: ARG002
        if self.stop.is_set():
            raise StartCancelled("verifying was called off")


def _local_launcher(
    deployment: Deployment, package: Path, options: ServeOptions, progress: Progress
) -> Launcher:
    _report(deployment, check_local(deployment, package, options), progress)
    if deployment.runtime == "cpu":
        return local_launcher(deployment, package)
    return NativeLauncher(deployment, package, options.devices)


def _docker_launcher(
    deployment: Deployment, package: Path, options: ServeOptions, progress: Progress
) -> Launcher:
    """The host is checked before gigabytes are pulled, and the image when it is there."""
    name = options.image_of(deployment)
    launcher = DockerLauncher(deployment, package, name, options.devices, mpi_slots())
    launcher.check()
    image = find_image(name)
    if image is None:
        _report(deployment, check_container(deployment, package, options, None), progress)
        image = pull_image(name, progress, deadline_s=options.pull_deadline_s)
    _report(deployment, check_container(deployment, package, options, image), progress)
    return replace(launcher, image=image.reference)


def _report(deployment: Deployment, found: tuple[Finding, ...], progress: Progress) -> None:
    """Print the warnings, and the errors that are allowed. Raises InvalidInput with all other errors."""
    for line in finding_lines(found):
        progress.say(line)
    refuse(deployment, found)
