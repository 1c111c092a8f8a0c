"""One Triton as a supervisor's component: verified at its first start, warmed up at each, its health watched."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.client.answer import Answer
from pipeline.contracts.images import named_image
from pipeline.errors import ServerError, UserError
from pipeline.keeper import HealthIssue, StartCancelled
from pipeline.machine.docker import find_image, pull_image
from pipeline.machine.host import mpi_slots
from pipeline.plan.preflight import Finding, finding_lines
from pipeline.process_state import exit_reason
from pipeline.progress import Progress, Silent, Task
from pipeline.serving.launch import Launcher, ServeOptions
from pipeline.serving.launch_docker import docker_launch
from pipeline.serving.launch_gpu import CHECKED
from pipeline.serving.log_files import LogLimit, log_folder, rotate
from pipeline.serving.monitor import HealthMonitor
from pipeline.serving.preflight import check_container, check_local, refuse
from pipeline.serving.server import TritonServer, local_launcher
from pipeline.store import FileHashes
from pipeline.triton.deployment import ENTRY, Deployment
from pipeline.triton.repository import check_package, check_without_weights

# Time in which a server whose models are gone may end by itself.
_ENDING_S = 0.5


class TritonComponent:
    """See `pipeline.keeper.Component`."""

    kind, title = "triton", "Triton"

    def __init__(
        self, package: Path, server: TritonServer, options: ServeOptions, progress: Progress
    ) -> None:
        self.package, self.server, self.options = package, server, options
        # Last answer of the warm-up.
        self.warm: Answer | None = None
        self._progress = progress
        self._log_limit = LogLimit(server.log_file)
        self._verified = False
        self._monitor: HealthMonitor | None = None

    @property
    def name(self) -> str:
        return self.server.deployment.name

    @property
    def pids(self) -> tuple[int, ...]:
        return self.server.pids

    @property
    def addresses(self) -> dict[str, str]:
        return self.server.record_fields

    def start(self, stop: threading.Event) -> None:
        """Start and verify it. Raises DamagedArtifact, too."""
        self._progress.say(
            f"starting Triton for {self.name} from {self.package}, for at most {self.server.start_deadline_s:.0f} s"
        )
        rotate(self.server.log_file)
        verification = _Verification(self.package, self.options.hashes, self._progress, stop)
        if not self._verified:
            verification.start()
        try:
            self.server.start(stop)
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
            interval_s=options.triton.health_interval_s,
            hang_timeout_s=options.triton.hang_timeout_s,
        )  # fmt: skip
        try:
            self._monitor.first_round(server.start_deadline_s, stop)
        except ServerError as error:
            raise server.failure(str(error)) from None

    def check(self) -> HealthIssue | None:
        assert self._monitor is not None, "start made it"
        self._log_limit.check()
        code, why = self.server.exit_code(), ""
        if code is None:
            issue = self._monitor.check()
            if issue is None and not self.server.keep_ports_open():
                issue = HealthIssue("doubt", "its ports are not served")
            if issue is None or issue.kind == "doubt":
                return issue
            # When the server dies, its models do, too, and may be seen first.
            code, why = self.server.exit_code(_ENDING_S), f"is ill: {issue.reason}"
        why = why if code is None else exit_reason(code)
        return HealthIssue("fault", str(self.server.failure(f"Triton for {self.name} {why}", tail=False)))

    def stop(self, *, at_once: bool) -> None:
        monitor, self._monitor = self._monitor, None
        if at_once:
            self.server.stop(at_once=True)
        if monitor is not None:
            monitor.close()
        self.server.stop()

    @property
    def client_argv(self) -> str:
        """Arguments that name this server on a client's command line: its own name where it is announced."""
        store = self.options.store
        if store is not None and (store.running / f"{self.name}.json").is_file():
            return shlex.join((self.name, *store.argv))
        if self.options.recipe:
            return shlex.join(self.options.recipe)
        deployment = self.server.deployment
        tokenizer = str(self.package.absolute() / deployment.tokenizer_dir)
        model = () if deployment.entry_model == ENTRY else ("--model", deployment.entry_model)
        return shlex.join(("--url", self.server.grpc_url, "--tokenizer", tokenizer, *model))

    def lines(self, stopped_by: str) -> Iterator[str]:
        """Lines that a person reads when it is ready; `stopped_by` is the command that ends it."""
        server = self.server
        assert self.warm is not None, "it was started"
        http = f", HTTP {server.http_url}" if server.http_url else ""
        yield (
            f"{self.name}: gRPC {server.grpc_url}{http}, metrics {server.metrics_url}\n"
            f"    models: {', '.join(server.deployment.models)}; clients talk to {server.entry_model}\n"
            f"    first token of a short prompt, warm: {self.warm.stats.ttft_ms:.1f} ms; log: {server.log_file}"
        )
        argv = self.client_argv
        yield f'ask: pipeline stream {argv} "…"   talk: pipeline chat {argv}   stop: {stopped_by}'


def make_triton(package: Path, options: ServeOptions, progress: Progress) -> TritonComponent:
    """Check that this machine can serve a package, and make its component.

    Raises:
        InvalidInput: The machine does not fit; all reasons at once.
        UserError: The package cannot be served this way.
        DamagedArtifact: Files of the package are not those that were built.
        ServerError: An image cannot be pulled.
    """
    check_without_weights(package, options.hashes, Silent())
    deployment = Deployment.load(package)
    local = options.target_of(deployment) == "local"
    launcher = (_local_launcher if local else _docker_launcher)(deployment, package, options, progress)
    server = TritonServer(
        deployment,
        launcher,
        local=local,
        ports=options.ports,
        address=options.triton.address,
        allowed_hosts=options.allowed_hosts,
        log_file=options.triton.log or log_file(options, deployment.name, "triton.log"),
        start_deadline_s=options.triton.start_timeout_s,
        stop_deadline_s=options.stop_deadline_s,
    )
    return TritonComponent(package, server, options, progress)


def log_file(options: ServeOptions, name: str, file: str) -> Path:
    """Choose where a log goes: to the store's folder of the deployment's logs, or else to a temporary folder."""
    if options.store is not None:
        with contextlib.suppress(OSError):
            folder = log_folder(options.store.logs.absolute(), name)
            if os.access(folder, os.W_OK):
                return folder / file
    return Path(tempfile.mkdtemp(prefix="pipeline-log-")) / file


def _local_launcher(
    deployment: Deployment, package: Path, options: ServeOptions, progress: Progress
) -> Launcher:
    _report(deployment, check_local(deployment, package, options), progress)
    return local_launcher(deployment, package, options.traces, devices=options.gpus, group=options.group)


def _docker_launcher(
    deployment: Deployment, package: Path, options: ServeOptions, progress: Progress
) -> Launcher:
    """Check the host before gigabytes are pulled, and the image when it is there."""
    name = options.image_of(deployment)

    def launcher(image: str) -> Launcher:
        return partial(
            docker_launch, deployment, package, image, devices=options.gpus, slots=mpi_slots(),
            traces=options.traces,
        )  # fmt: skip

    launcher(name)(replace(CHECKED, ports=options.ports)).prepare()
    image = find_image(name)
    if image is None:
        _report(deployment, check_container(deployment, package, options, None), progress)
        refuse_to_pull(deployment, name)
        image = pull_image(name, progress, deadline_s=options.triton.pull_timeout_s)
    _report(deployment, check_container(deployment, package, options, image), progress)
    return launcher(image.reference)


def refuse_to_pull(deployment: Deployment, name: str) -> None:
    """Refuse to pull an image that is built first.

    Raises:
        UserError: It is built first; the text has the command, and why.
    """
    required, runtime = deployment.requirements, deployment.runtime
    if required is None or runtime == "cpu":
        return
    image = named_image(name, required.tensorrt_llm, runtime)
    if image.why is not None:
        command = "\n".join(image.build_command())
        raise UserError(f"{name} is built first, in a checkout of pipeline: {image.why}\n{command}")


def _report(deployment: Deployment, findings: Sequence[Finding], progress: Progress) -> None:
    """Print the warnings, and the errors that are allowed. Raises InvalidInput with all other errors."""
    for line in finding_lines(findings):
        progress.say(line)
    refuse(deployment, findings)


class _Verification(threading.Thread):
    """Reads a package's files beside the start, and sets `stop` if they are not those that were built."""

    def __init__(self, package: Path, hashes: FileHashes, progress: Progress, stop: threading.Event) -> None:
        super().__init__(name="verify", daemon=True)
        self.failure: Exception | None = None
        self._package, self._hashes, self._progress, self._stop_serving = package, hashes, progress, stop

    def run(self) -> None:
        try:
            check_package(self._package, self._hashes, _CancellableProgress(self._stop_serving))
        except StartCancelled:
            pass
        except Exception as error:
            # `TritonComponent.start` raises it.
            self.failure = error
            self._stop_serving.set()

    def passed(self) -> bool:
        """Wait for the end. Returns whether all files are those that were built."""
        if self.is_alive():
            self._progress.say("it answers; it is ready when its weights have been verified, too")
        self.join()
        return not self._stop_serving.is_set()


@dataclass(frozen=True, slots=True)
class _CancellableProgress(Silent):
    """Ends a task by raising StartCancelled when the event is set."""

    stop: threading.Event

    @contextlib.contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:  # noqa: ARG002
        yield self

    def advance(self, amount: float = 1) -> None:  # noqa: ARG002
        if self.stop.is_set():
            raise StartCancelled("verifying was called off")
