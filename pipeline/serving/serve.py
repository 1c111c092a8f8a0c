"""Serve packages until told to stop: checked against this machine, started, announced, supervised, ended.

By processes of this machine, or by a container (`launch_*` has the commands, `server.TritonServer` the process), with a
gateway in front of them if the caller gives its command line. While they run they are announced in `<store>/running/`,
so that clients find them by the names of their recipes, and checked by real inference: Triton reports itself ready even
when the process of a model is dead.

How a Ctrl-C ends everything: `stop` is set, `Supervisor.run` stops its keepers, they end the gateway and
`machine/process_guard.py`, and that the processes of the server. How a `kill -9` of this process does: the kernel kills
the gateway, the guard sees the end of its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ServerError
from pipeline.keeper import HealthIssue, StartCancelled
from pipeline.machine.docker import find_image, pull_image
from pipeline.machine.host import mpi_slots
from pipeline.plan.preflight import Finding, finding_lines
from pipeline.process_state import exit_reason
from pipeline.progress import Progress, Silent, Task
from pipeline.serving.announcement import Announcement
from pipeline.serving.control import ControlServer
from pipeline.serving.gateway_process import GatewayLaunch, GatewayProcess
from pipeline.serving.launch import Launcher, ServeOptions
from pipeline.serving.launch_docker import DockerLauncher
from pipeline.serving.launch_gpu import NativeLauncher
from pipeline.serving.log_files import LogLimit, log_folder, rotate
from pipeline.serving.monitor import HealthMonitor
from pipeline.serving.preflight import check_container, check_local, refuse
from pipeline.serving.probe import ProbeGeneration
from pipeline.serving.rollout import Rollouts
from pipeline.serving.server import TritonServer, local_launcher
from pipeline.serving.supervisor import Supervisor
from pipeline.store import FileHashes, Store
from pipeline.triton.deployment import ENTRY, Deployment
from pipeline.triton.repository import check_package, check_without_weights
from pipeline.triton.running import RunningServer

_ENDING_S = 0.5


def serve(
    packages: Sequence[tuple[Path, ServeOptions]],
    progress: Progress,
    stop: threading.Event,
    *,
    gateway: GatewayLaunch | None = None,
    ready_file: Path | None = None,
    stopped_by: str = "Ctrl-C",
) -> None:
    """Serve packages until `stop` is set.

    A package is ready when it answers, and all its files are those that were built; weights that have to be read for
    that are read while they are loaded.

    Args:
        packages: Folders with deployment.json and model_repository/, each with its ports, deadlines and target. What
            concerns all (the restart policy, where it is announced) is taken from the first.
        progress: Where to report.
        stop: Ends everything when it is set, also while it starts.
        gateway: How the gateway in front of them is started; None for none.
        stopped_by: What a reader is told to end it by.
        ready_file: A file that is there while everything is ready; see `pipeline.serving.health`.

    Raises:
        InvalidInput: The machine does not fit; all reasons at once.
        UserError: The package cannot be served this way, or a server for this recipe runs already.
        DamagedArtifact: Files of the package are not those that were built.
        ServerError: Something did not start, or failed too often where the policy gives up (`GaveUp`).
    """
    first = packages[0][1]
    tritons = [_make_triton(package, options, progress) for package, options in packages]
    components = ("triton",) if gateway is None else ("triton", "gateway")
    gateway_log = _log_file(first, tritons[0].name, "gateway.log") if gateway is not None else None
    control_path = None if first.running is None else first.running / f"{tritons[0].name}.sock"
    began = time.monotonic()
    with ExitStack() as stack:
        announcements = {}
        for triton in tritons:
            record = RunningServer.of(
                triton.server,
                triton.package,
                state="starting",
                gateway_url="" if gateway is None else gateway.url,
                log=triton.server.log_file.absolute(),
                gateway_log=gateway_log,
                control=control_path,
                recipe=triton.options.recipe,
                settings=triton.options.settings,
            )
            announcement = Announcement(
                first.running, triton.name, record, components,
                ready_file=ready_file, entry_model=triton.server.entry_model,
            )  # fmt: skip
            # Undone when another one of them is served already.
            stack.callback(announcement.withdraw)
            announcement.claim(progress, needed=gateway is not None)
            announcements[triton.name] = announcement
        process = None
        if gateway is not None:
            assert gateway_log is not None, "it was made for it"
            process = GatewayProcess(gateway, gateway_log)
            stack.callback(process.close)
        supervisor = Supervisor(
            {triton.name: (triton, announcements[triton.name]) for triton in tritons},
            process,
            first.restart,
            progress,
            stop,
        )
        Rollouts(supervisor, _make_triton, progress)
        control = _open_control(control_path, supervisor, progress, stack)
        supervisor.run(
            lambda: progress.say(
                _ready_text(tritons, gateway, gateway_log, stopped_by, time.monotonic() - began)
            ),
            control,
        )
    progress.say("stopped " + ", ".join(f"Triton for {triton.name}" for triton in tritons))


class TritonComponent:
    """One Triton, as its supervisor keeps it: verified at the first start, warmed up at each, its health watched."""

    kind, title = "triton", "Triton"

    def __init__(
        self, package: Path, server: TritonServer, options: ServeOptions, progress: Progress
    ) -> None:
        """
        Args:
            package: What it serves.
            server: The process, not started.
            options: How it is served.
            progress: Where to report.
        """
        self.package, self.server, self.options = package, server, options
        self.warm: ProbeGeneration | None = None  # the last answer of the warm-up
        self._progress = progress
        self._log_limit = LogLimit(server.log_file)
        self._verified = False
        self._monitor: HealthMonitor | None = None

    @property
    def name(self) -> str:
        """Of the recipe."""
        return self.server.deployment.name

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes."""
        return self.server.pids

    @property
    def addresses(self) -> dict[str, str]:
        """See `supervisor.Component`: its ports may have been taken by another process."""
        server = self.server
        return server.record_fields

    def start(self, stop: threading.Event) -> None:
        """See `supervisor.Component`. Raises DamagedArtifact, too."""
        self._progress.say(
            f"starting Triton for {self.name} from {self.package}, for at most {self.server.start_deadline_s:.0f} s"
        )
        rotate(self.server.log_file)
        verification = _Verification(self.package, self.options.hashes, self._progress, stop)
        if not self._verified:
            verification.start()
        try:
            self.server.until(stop).start()
            self.warm = self.server.warmup()
            if not self._verified and not verification.passed():
                raise StartCancelled("the package was not verified")
        except ServerError as error:
            # What is damaged may be why.
            if verification.failure is not None:
                raise verification.failure from error
            raise
        self._verified = True
        server, options = self.server, self.options
        self._monitor = HealthMonitor(
            server.deployment, server.target, server.metrics_url, server.pids,
            interval_s=options.health_interval_s, hang_timeout_s=options.hang_timeout_s,
        )  # fmt: skip
        try:
            self._monitor.first_round(server.start_deadline_s, stop)
        except ServerError as error:
            raise server.failure(str(error)) from None

    def check(self) -> HealthIssue | None:
        """See `supervisor.Component`."""
        assert self._monitor is not None, "start made it"
        self._log_limit.check()
        code, why = self.server.exit_code(), ""
        if code is None:
            found = self._monitor.check()
            if found is None and not self.server.keep_ports_open():
                found = HealthIssue("doubt", "its ports are not served")
            if found is None or found.kind == "doubt":
                return found
            # When the server dies, its models do, too, and may be seen first.
            code, why = self.server.exit_code(_ENDING_S), f"is ill: {found.reason}"
        why = why if code is None else exit_reason(code)
        return HealthIssue("fault", str(self.server.failure(f"Triton for {self.name} {why}", tail=False)))

    def stop(self, *, at_once: bool) -> None:
        """See `supervisor.Component`."""
        monitor, self._monitor = self._monitor, None
        if at_once:
            self.server.stop(at_once=True)
        if monitor is not None:
            monitor.close()
        self.server.stop()

    @property
    def words(self) -> str:
        """What names this server on a client's command line: its own name where it is announced."""
        running = self.options.running
        if running is not None and (running / f"{self.name}.json").is_file():
            return shlex.join((self.name, *Store(running.parent).words))
        if self.options.recipe:
            return shlex.join(self.options.recipe)
        deployment = self.server.deployment
        tokenizer = str(self.package.absolute() / deployment.tokenizer_dir)
        model = () if deployment.entry_model == ENTRY else ("--model", deployment.entry_model)
        return shlex.join(("--url", self.server.grpc_url, "--tokenizer", tokenizer, *model))

    def lines(self, stopped_by: str) -> Iterator[str]:
        """What a person wants to know of it when it is ready; `stopped_by` is how it is ended."""
        server = self.server
        assert self.warm is not None, "it was started"
        http = f", HTTP {server.http_url}" if server.http_url else ""
        yield (
            f"{self.name}: gRPC {server.grpc_url}{http}, metrics {server.metrics_url}\n"
            f"    models: {', '.join(server.models)}; clients talk to {server.entry_model}\n"
            f"    first token of a short prompt, warm: {self.warm.first_s * 1000:.1f} ms; log: {server.log_file}"
        )
        yield f'ask: pipeline stream {self.words} "…"   talk: pipeline chat {self.words}   stop: {stopped_by}'


def _make_triton(package: Path, options: ServeOptions, progress: Progress) -> TritonComponent:
    check_without_weights(package, options.hashes, Silent())
    deployment = Deployment.load(package)
    launcher = _docker_launcher if options.target_of(deployment) == "docker" else _local_launcher
    server = TritonServer(
        deployment,
        launcher(deployment, package, options, progress),
        ports=options.ports,
        address=options.address,
        allowed_hosts=options.allowed_hosts,
        log_file=_log_file(options, deployment.name, "triton.log"),
        start_deadline_s=options.start_deadline_s,
        stop_deadline_s=options.stop_deadline_s,
    )
    return TritonComponent(package, server, options, progress)


def _log_file(options: ServeOptions, name: str, kind: str) -> Path:
    """Where a component's log goes: the file that was named, the store's folder, or else a temporary folder."""
    if options.log_file is not None and kind == "triton.log":
        return options.log_file
    if options.logs is not None:
        with contextlib.suppress(OSError):
            folder = log_folder(options.logs.absolute(), name)
            if os.access(folder, os.W_OK):
                return folder / kind
    return Path(tempfile.mkdtemp(prefix="pipeline-log-")) / kind


def _open_control(
    path: Path | None, supervisor: Supervisor, progress: Progress, stack: ExitStack
) -> ControlServer | None:
    if path is None or not path.parent.is_dir():
        return None
    try:
        return stack.enter_context(ControlServer(path, supervisor.handlers))
    except OSError as error:
        progress.say(f"{path} cannot be made ({error.strerror}): this server takes signals only")
        return None


def _ready_text(
    tritons: Sequence[TritonComponent],
    gateway: GatewayLaunch | None,
    gateway_log: Path | None,
    stopped_by: str,
    took_s: float,
) -> str:
    """Addresses, and a line to paste for each kind of client."""
    lines = [f"ready after {took_s:.1f} s"]
    for triton in tritons:
        lines += triton.lines(stopped_by)
    if gateway is not None:
        lines.append(f"OpenAI API: {gateway.url}/v1   page: {gateway.url}/   log: {gateway_log}")
        lines += openai_lines(gateway.url, tritons[0].name, needs_key=gateway.needs_key)
    return "\n  ".join(lines)


def openai_lines(url: str, model: str, *, needs_key: bool) -> tuple[str, str]:
    """Lines for a shell that ask a gateway: by curl, and by OpenAI's own Python package.

    Args:
        url: Of the gateway.
        model: Name of a model that chats.
        needs_key: Whether an API key is asked for; it is taken from $OPENAI_API_KEY.
    """
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True})
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    given = "" if needs_key else ", api_key='none'"
    code = (
        f"from openai import OpenAI; print(OpenAI(base_url='{url}/v1'{given}).chat.completions.create("
        f"model='{model}', messages=[{{'role': 'user', 'content': 'Hello'}}]).choices[0].message.content)"
    )
    return (
        f"curl: curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
        f'openai: python -c "{code}"',
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
        return local_launcher(deployment, package, options.traces)
    return NativeLauncher(deployment, package, options.devices, traces=options.traces, group=options.group)


def _docker_launcher(
    deployment: Deployment, package: Path, options: ServeOptions, progress: Progress
) -> Launcher:
    """The host is checked before gigabytes are pulled, and the image when it is there."""
    name = options.image_of(deployment)
    launcher = DockerLauncher(deployment, package, name, options.devices, mpi_slots(), traces=options.traces)
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
