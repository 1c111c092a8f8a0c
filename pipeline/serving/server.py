"""A Triton server as a context: started, ready and healthy inside, gone after.

    with TritonServer.of_package(package) as server:
        server.target  # "unix:/tmp/pipeline-5x1k0a2c/grpc:1"

Processes of this machine listen on sockets in a folder that only their user can enter; TCP ports are for others, and
have a process of their own in front of them (`ports`). Only the page of metrics has a port of Triton's own.
A launcher (`launch.Launcher`) decides which processes it consists of: the embedded server, TensorRT-LLM's below mpirun,
a container. They run below a guard (`machine/process_guard.py`), so that nothing of them outlives this process.
Each start has a deadline, and is done when a real generation came back. Everything the server prints goes to
`log_file`; a failure shows the end of it and the likely cause.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pipeline.client.answer import Answer
from pipeline.errors import ServerError
from pipeline.keeper import StartCancelled
from pipeline.machine import process_guard
from pipeline.machine.processes import listening, start_guarded
from pipeline.process_state import SUPERVISOR, own_mark
from pipeline.serving import triton_log
from pipeline.serving.launch import HostGroup, Launch, Launcher, Start, drain_s
from pipeline.serving.launch_embedded import embedded_launch
from pipeline.serving.launch_gpu import GpuPlace, gpu_launch
from pipeline.serving.log_files import open_log
from pipeline.serving.ports import LOOPBACK, Ports, PublishedPorts, ServerAddresses
from pipeline.serving.probe import generate, is_ready
from pipeline.triton.deployment import REPOSITORY, Deployment

_POLL_S = 0.05
_READY_TIMEOUT_S = 2.0
_WARMUP_TOKENS = 16
# A server whose log says that it gave up has so long to end by itself.
_GIVING_UP_S = 3.0
_ADDRESS_TAKEN = "already in use"


class TritonServer(ServerAddresses):
    """One server on this machine. Not for use from several threads."""

    def __init__(
        self,
        deployment: Deployment,
        launcher: Launcher,
        *,
        local: bool = True,
        ports: Ports | None = None,
        address: str = LOOPBACK,
        allowed_hosts: Sequence[str] = (),
        log_file: Path | None = None,
        start_deadline_s: float | None = None,
        stop_deadline_s: float = 10.0,
    ) -> None:
        """Prepare a server; `start`, or entering it as a context, starts it.

        Args:
            local: Whether the server is processes of this machine, which share its files and can be looked at.
            ports: Ports at which others reach it; None for none but a free one for metrics.
            address: Address of these ports.
            allowed_hosts: Names by which requests over HTTP may call this machine, besides those of loopback.
            log_file: File for what it prints; None for a file in the temporary folder that is kept after a failure. A
                new file can be read by its owner alone.
            start_deadline_s: Time to become ready; None for what the deployment's size asks for.
            stop_deadline_s: Time between SIGTERM and SIGKILL; `drain_s` of it is for requests in flight.
        """
        self.deployment = deployment
        super().__init__(ports, address, local=local)
        self._launcher = launcher
        self._allowed_hosts = allowed_hosts
        self.log_file = (
            log_file or Path(tempfile.gettempdir()) / f"pipeline-triton-{secrets.token_hex(4)}.log"
        )
        self.start_deadline_s = deployment.start_deadline_s if start_deadline_s is None else start_deadline_s
        self._own_log = log_file is None
        self._stop_deadline_s = stop_deadline_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._guarded: process_guard.GuardedProcess | None = None
        self._launched: Launch | None = None
        self._published: PublishedPorts | None = None

    @classmethod
    def of_package(cls, package: Path, *, launcher: Launcher | None = None, **options: Any) -> Self:
        """Make a server for a folder of `pipeline build`, with deployment.json and model_repository/.

        Args:
            launcher: None for the processes of this machine that the runtime needs.
            options: See the constructor.

        Raises:
            InvalidInput, UnreadableFile: There is no deployment.json, or it has another content.
        """
        deployment = Deployment.load(package)
        return cls(deployment, launcher or local_launcher(deployment, package), **options)

    @property
    def entry_model(self) -> str:
        """The model that clients talk to."""
        return self.deployment.entry_model

    @property
    def running(self) -> bool:
        """Whether the server's process is there; `check_health` tells more."""
        return self._guard is not None and self._guard.poll() is None

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """Return how a server ended by itself: its exit code, or 128 + signal; None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return None if self._guard is None else self._guard.wait(timeout_s)
        return None

    @property
    def pids(self) -> tuple[int, ...]:
        """All processes of the server, as far as this machine shows them; none while it is not running."""
        if self._guard is None or self._guarded is None:
            return ()
        return tuple(process_guard.marked(self._guarded.mark))

    def start(self, stopping: threading.Event | None = None) -> None:
        """Start the server, and wait until it has answered a generation. After a failure nothing is left running.

        Raises:
            StartCancelled: `stopping` was set meanwhile.
            UserError: Triton cannot run here; the text says what to do.
            ServerError: It did not start, or does not answer; the text says why, with the end of its log.
        """
        if self.running:
            raise ServerError("the server is running already")
        if not self.ports.movable:
            self.ports.check(self.address)
        elif self.ports.faults(self.address):
            self.ports = self.ports.moved()
        deadline = time.monotonic() + self.start_deadline_s
        try:
            self._start(deadline, stopping)
            self.check_health(timeout_s=max(1.0, deadline - time.monotonic()))
        except BaseException:
            self.stop()
            raise

    def stop(self, *, at_once: bool = False) -> None:
        """End the server and everything it started; SIGKILL when SIGTERM does not help in time, or `at_once`."""
        try:
            self._end_processes(at_once=at_once)
        finally:
            # After Triton, so that others get their answers whole.
            if self._published is not None:
                self._published.close()
                self._published = None

    def _end_processes(self, *, at_once: bool) -> None:
        if self._guard is None:
            return
        assert self._guard.stdin is not None, "it was started with a pipe"
        self._guard.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._guard.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)
        try:
            self._guard.wait(self._stop_deadline_s + process_guard.AFTERWARDS_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # the kernel then kills the server
            self._guard.wait()
        assert self._guarded is not None, "it was started with a guard"
        if self._guard.returncode < 0:  # it was killed, and could not clean up
            process_guard.remove_traces(self._guarded)
        self._guard = None

    def wait(self) -> int:
        """Wait until the server ends by itself. Returns its exit code, or 128 + signal."""
        return self._guard.wait() if self._guard is not None else 0

    def check_health(self, *, timeout_s: float = 30.0) -> Answer:
        """Generate one token through the model that clients use.

        Raises:
            ServerError: There is no answer; the text shows the end of the log.
        """
        if not self.running:
            raise self.failure("Triton is not running")
        try:
            return generate(self.target, self.entry_model, "Hello", max_tokens=1, timeout_s=timeout_s)
        except ServerError as error:
            raise self.failure(str(error)) from None

    def warmup(self, rounds: int = 5) -> Answer:
        """Generate some short answers, so that the first client finds everything loaded, and return the last.

        Raises:
            ServerError: The server does not answer.
        """
        tokens = min(_WARMUP_TOKENS, self.deployment.limits.max_output_tokens)
        for _ in range(rounds):
            answer = generate(self.target, self.entry_model, "Hello", max_tokens=tokens, timeout_s=60.0)
        return answer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._own_log and error is None:
            self.log_file.unlink(missing_ok=True)

    def _start(self, deadline: float, stopping: threading.Event | None) -> None:
        for attempt in count(1):
            launch = self._launch()
            code = self._wait_until_ready(launch, deadline, stopping)
            if code is None:
                assert self._guarded is not None, "_launch made it"
                # The guard's filter, on a machine that it does not know, lets others read it.
                for region in Path("/dev/shm").glob(f"{self._guarded.mark}*"):
                    region.chmod(0o600)
                return
            self.stop()
            port_lost = self._lost_port(launch)
            if port_lost:
                self.ports = self.ports.moved()
            by_signal = code > 128
            if attempt == launch.attempts or not (port_lost or by_signal):
                raise self.failure(f"Triton ended with exit code {code} while it started")

    def _launch(self) -> Launch:
        if self._local:
            self._published = self._publish()
        self.make_folder()
        start = Start(
            stage=Path(tempfile.mkdtemp(prefix="start-", dir=self._folder)),
            listeners=self.listeners,
            shared_memory_prefix=f"pipeline-{secrets.token_hex(6)}-",
            ports=self.ports,
            address=self.address,
            deadline_s=self.start_deadline_s,
            drain_s=drain_s(self._stop_deadline_s),
        )
        # HTTP does not listen on a socket that is there already.
        (self._folder / "http").unlink(missing_ok=True)
        try:
            launch = self._launcher(start)
            launch.prepare()
        except BaseException:
            shutil.rmtree(start.stage, ignore_errors=True)
            raise
        self._launched = launch
        self._guarded = process_guard.GuardedProcess(
            self._stop_deadline_s,
            str(start.stage),
            start.shared_memory_prefix,
            launch.cleanup,
            str(self._folder),
        )
        with open_log(self.log_file, own=self._own_log, anew=True) as output:
            environment = {**launch.environment, SUPERVISOR: own_mark()}
            self._guard = start_guarded(launch.command, self._guarded, output, environment)
        self.keep_ports_open()
        return launch

    def _publish(self) -> PublishedPorts:
        try:
            return PublishedPorts(self.address, self.ports, self.listeners, self._allowed_hosts)
        except ServerError:
            if not self.ports.movable:
                raise
        self.ports = self.ports.moved()
        return PublishedPorts(self.address, self.ports, self.listeners, self._allowed_hosts)

    def keep_ports_open(self) -> bool:
        """Start what serves the ports again if it has died; called several times a second. Returns whether it runs."""
        if self._published is None or self._guarded is None:
            return True
        # Variables by which all processes of this start are known.
        marks = {process_guard.MARK: self._guarded.mark, SUPERVISOR: own_mark()}
        return self._published.serve(marks, self.log_file)

    def _wait_until_ready(
        self, launch: Launch, deadline: float, stopping: threading.Event | None
    ) -> int | None:
        """Wait until it is ready. Returns its exit code if it ended instead."""
        assert self._guard is not None, "_launch started it"
        while (code := self._guard.poll()) is None:
            targets = dict.fromkeys((self.target, self.grpc_url))
            if all(is_ready(target, timeout_s=_READY_TIMEOUT_S) for target in targets) and self._listens():
                return None
            self.keep_ports_open()
            lost_port = self._lost_port(launch)
            if lost_port or triton_log.contains(self.log_file, launch.gave_up):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self._guard.wait(_GIVING_UP_S)
                if lost_port:
                    return 1  # Triton 24.10 may hang then instead of ending
                raise self.failure("Triton gave up while it started")
            if stopping is not None and stopping.is_set():
                raise StartCancelled("Triton was told to stop before it was ready")
            if time.monotonic() > deadline:
                raise self.failure(f"Triton was not ready within {self.start_deadline_s:g} s")
            time.sleep(_POLL_S)
        return code

    def _lost_port(self, launch: Launch) -> bool:
        """Tell whether somebody took one of the ports, none of which was asked for, before Triton did."""
        errors = triton_log.errors(self.log_file, noise=launch.noise) if self.ports.movable else ()
        return any(_ADDRESS_TAKEN in line for line in errors)

    def _listens(self) -> bool:
        """Tell whether this server holds its ports: another may have taken one while it loaded, and Triton says that it
        is ready before it opens the page of metrics."""
        if not self._local:
            # Processes of a container cannot be seen.
            return True
        ports = set().union(*(listening(pid) for pid in self.pids))
        return self.ports.metrics in ports

    def failure(self, problem: str, *, tail: bool = True) -> ServerError:
        """Make an error of what happened and what the log says about it: errors, or else its end; the likely cause."""
        launch = self._launched or Launch(())
        errors = [f"  {line}" for line in triton_log.errors(self.log_file, noise=launch.noise)]
        last = [f"  | {line[:200]}" for line in triton_log.tail(self.log_file)] if tail else []
        known = triton_log.causes(self.log_file, noise=launch.noise)
        causes = [f"likely cause: {cause}" for cause in known]
        text = "\n".join([problem, *(errors or last), *causes, f"its log: {self.log_file}"])
        for path, meant in launch.synonyms.items():
            text = text.replace(path, meant)
        return ServerError(text)


def local_launcher(
    deployment: Deployment,
    package: Path,
    traces: str | None = None,
    *,
    devices: tuple[int, ...] = (),
    group: HostGroup | None = None,
) -> Launcher:
    """Make a launcher of the processes of this machine that serve a package.

    Args:
        traces: URL of an OTLP/HTTP receiver of spans; None for no spans.
        devices: GPUs that they may use; empty for all.
        group: Machines that share the ranks; None for this one alone.
    """
    if deployment.runtime == "cpu":
        return partial(embedded_launch, (package / REPOSITORY).absolute(), deployment.models, traces=traces)
    place = GpuPlace(devices=devices, traces=traces, group=group)
    return partial(gpu_launch, deployment, package, place=place)
