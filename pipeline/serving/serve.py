"""A package, put to work in the foreground: looked at, checked against the machine, started, watched, ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pipeline.contracts.launching import launching
from pipeline.errors import ServerError, UserError
from pipeline.machine.docker_images import Image, find_image, pull_image
from pipeline.machine.host import mpi_slots
from pipeline.machine.inventory import take
from pipeline.machine.software import software_here, software_of_image
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.preflight import Finding, allow, finding_lines
from pipeline.progress import Progress, Silent, Task
from pipeline.serving.docker import DockerLauncher
from pipeline.serving.dry_run import Outline, outline
from pipeline.serving.gpu_launch import LaunchPlan, Place, plan_launch
from pipeline.serving.imports import modules_of
from pipeline.serving.launch import LOOPBACK, Launcher, Ports
from pipeline.serving.local import LocalDeployment
from pipeline.serving.native_launch import NativeLauncher
from pipeline.serving.preflight import port_findings, preflight, refuse
from pipeline.serving.server import Stopped, TritonServer, local_launcher
from pipeline.store import FileHashes
from pipeline.triton.deployment import Deployment
from pipeline.triton.integrity import check_package, check_without_weights

Target = Literal["local", "docker"]
_OF_GPUS, _LIMITS = ("gpus", "topology", "temporary"), ("shm_bytes", "ulimits")
_LOOK_S = 60.0  # a driver that no process holds open takes long to answer


@dataclass(frozen=True, slots=True)
class Options:
    """How to serve, as far as the package leaves it open."""

    ports: Ports
    address: str = LOOPBACK
    log_file: Path | None = None
    start_deadline_s: float | None = None  # None: what the package's size asks for
    stop_deadline_s: float = 10.0  # a third of it is for requests in flight
    health_interval_s: float = 30.0  # 0: no checks
    running: Path | None = None  # folder where servers are announced
    target: Target | None = (
        None  # None: local for a CPU and inside a container with TensorRT-LLM, else docker
    )
    image: str | None = None  # None: the one that the package was made for
    devices: tuple[int, ...] = ()  # GPUs; empty: as many as it needs
    pull_deadline_s: float = 3600.0
    allowed: frozenset[str] = frozenset()  # rules of preflight whose errors are let pass
    # Those of the package's files that need not be read again.
    hashes: FileHashes = field(default_factory=lambda: FileHashes(None))
    # Words that name recipe and store on a command line; empty: the package is all.
    recipe: tuple[str, ...] = ()


def serve(
    package: Path,
    options: Options,
    progress: Progress,
    stop: threading.Event,
    *,
    on_ready: Callable[[TritonServer], None] = lambda _: None,
    on_ill: Callable[[], None] = lambda: None,
) -> None:
    """Serve a package until `stop` is set. It is ready when it answers, and all its files are those that were built.

    Weights that have to be read for that are read while they are loaded.

    Raises:
        InvalidInput: the machine does not fit; all reasons at once. UserError: it cannot be served this way.
        DamagedArtifact: files of the package are not those that were built.
        ServerError: it did not start, died, or stopped answering.
    """
    check_without_weights(package, options.hashes, Silent())
    deployment = Deployment.load(package)
    launcher = _docker_launcher if _target(deployment, options) == "docker" else _local_launcher
    server = TritonServer(
        deployment,
        launcher(deployment, package, options, progress),
        ports=options.ports,
        address=options.address,
        log_file=options.log_file,
        start_deadline_s=options.start_deadline_s,
        stop_deadline_s=options.stop_deadline_s,
    )
    check = _Check(package, options.hashes, progress, stop)
    deploying = LocalDeployment(
        deployment.name,
        package,
        server,
        options.running,
        progress,
        verified=check.passed,
        recipe=options.recipe,
        on_ready=lambda: on_ready(server),
        on_ill=on_ill,
    )
    check.start()
    try:
        deploying.run(stop, health_interval_s=options.health_interval_s)
    except ServerError as error:
        # What is damaged may be why.
        if check.failure is not None:
            raise check.failure from error
        raise
    if check.failure is not None:
        raise check.failure


class _Check(threading.Thread):
    """Reads a package's files beside the start, and calls that off if they are not those that were built."""

    def __init__(self, package: Path, hashes: FileHashes, progress: Progress, stop: threading.Event) -> None:
        super().__init__(name="verify", daemon=True)
        self.failure: Exception | None = None
        self._package, self._hashes, self._progress, self._calls_off = package, hashes, progress, stop

    def run(self) -> None:
        try:
            check_package(self._package, self._hashes, _UntilStopped(self._calls_off))
        except Stopped:
            pass
        except Exception as error:
            # `serve` raises it.
            self.failure = error
            self._calls_off.set()

    def passed(self) -> bool:
        """Wait for the end; whether all files are those that were built."""
        if self.is_alive():
            self._progress.say("it answers; it is ready when its weights have been verified, too")
        self.join()
        return not self._calls_off.is_set()


@dataclass(frozen=True, slots=True)
class _UntilStopped(Silent):
    """Ends a task by raising Stopped when the event is set."""

    stop: threading.Event

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:  # noqa: ARG002
        yield self

    def advance(self, amount: float = 1) -> None:  # noqa: ARG002
        if self.stop.is_set():
            raise Stopped("verifying was called off")


def _local_launcher(deployment: Deployment, package: Path, options: Options, progress: Progress) -> Launcher:
    _hold(deployment, check_local(deployment, package, options), progress)
    if deployment.runtime == "cpu":
        return local_launcher(deployment, package)
    return NativeLauncher(deployment, package, options.devices)


def _docker_launcher(deployment: Deployment, package: Path, options: Options, progress: Progress) -> Launcher:
    """The host is looked at before gigabytes are pulled, and the image when it is there."""
    name = _image(deployment, options)
    launcher = DockerLauncher(deployment, package, name, options.devices, mpi_slots())
    launcher.check()
    image = find_image(name)
    if image is None:
        _hold(deployment, check_container(deployment, package, options, None), progress)
        image = pull_image(name, progress, deadline_s=options.pull_deadline_s)
    _hold(deployment, check_container(deployment, package, options, image), progress)
    return replace(launcher, image=image.reference)


def _hold(deployment: Deployment, found: tuple[Finding, ...], progress: Progress) -> None:
    """Say the warnings, and what is let pass; refuse for the errors."""
    for line in finding_lines(found):
        progress.say(line)
    refuse(deployment, found)


def dry_run_of(
    package: Path, options: Options, foreseen: Deployment | None = None, note: str = ""
) -> Outline:
    """What `serve` would run, and what this machine lacks for it; nothing is started or pulled.

    Args:
        foreseen: of a package that is not built yet; then nothing of it is read.
        note: what a reader must know besides.
    """
    deployment = foreseen or Deployment.load(package)
    docker = None
    if deployment.runtime == "cpu":
        _target(deployment, options)
        found = check_local(deployment, package, options)
    else:
        image = None
        with suppress(ServerError):  # without Docker the name will do
            image = find_image(_image(deployment, options))
        name = image.reference if image else _image(deployment, options)
        docker = DockerLauncher(deployment, package, name, options.devices, mpi_slots())
        if _target(deployment, options) == "docker":
            found = check_container(
                deployment, package, options, None
            )  # to ask the image, it would have to run
        else:
            found = check_local(deployment, package, options)
    return outline(
        deployment,
        package,
        ports=options.ports,
        address=options.address,
        start_deadline_s=options.start_deadline_s or deployment.start_deadline_s,
        docker=docker,
        findings=tuple(found),
        built=foreseen is None,
        note=note,
    )


def check_local(deployment: Deployment, package: Path, options: Options) -> tuple[Finding, ...]:
    """What keeps this machine, or the container that this runs in, from serving."""
    plan = _plan(deployment, options)
    if plan is None:
        return _checked(preflight(deployment, None, _here(options, "temporary")), options)
    software, here = software_here(plan.programs, modules_of(package)), _here(options, *_OF_GPUS, *_LIMITS)
    found = preflight(deployment, plan, here, software, "local", options.recipe or _of(package))
    return _checked(found, options)


def check_container(
    deployment: Deployment, package: Path, options: Options, image: Image | None
) -> tuple[Finding, ...]:
    """What keeps a container of this host from serving. `image`: None if it is not to be asked."""
    software = software_of_image(image.reference, modules_of(package)) if image else None
    here = _here(options, *_OF_GPUS, "docker")
    plan, served = _plan(deployment, options), options.recipe or _of(package)
    return _checked(preflight(deployment, plan, here, software, "docker", served), options)


def _of(package: Path) -> tuple[str, ...]:
    """The words that name a package on a command line."""
    return ("--package", str(package.absolute()))


def _checked(found: tuple[Finding, ...], options: Options) -> tuple[Finding, ...]:
    """With ports that are taken, and with what is let pass marked."""
    return allow((*port_findings(options.ports.faults(options.address)), *found), options.allowed)


def _here(options: Options, *probes: str) -> MachineFacts:
    return take(only=probes, deadline_s=_LOOK_S).facts(options.devices)


def _plan(deployment: Deployment, options: Options) -> LaunchPlan | None:
    if deployment.runtime == "cpu":
        return None
    return plan_launch(deployment, Place(options.ports, "check-", devices=options.devices))


def _target(deployment: Deployment, options: Options) -> Target:
    if deployment.runtime == "cpu":
        if options.target == "docker":
            raise UserError(f"{deployment.name} is for this machine's CPU: --target local")
        return "local"
    return options.target or ("local" if Path(_server(deployment)).exists() else "docker")


def _server(deployment: Deployment) -> str:
    """Where the containers have the server: whoever has it there is inside one."""
    assert deployment.requirements is not None, "a deployment for a GPU has them"
    return launching(deployment.requirements.tensorrt_llm).server


def _image(deployment: Deployment, options: Options) -> str:
    if options.image:
        return options.image
    assert deployment.requirements is not None, "a deployment for a GPU has them"
    return deployment.requirements.image
