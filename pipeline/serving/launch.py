"""What every start of a Triton server has in common: how it is wanted, where it listens, which files it sees.

A `Launcher` knows a package and a way to serve it; for each attempt it makes a `Launch`, a value that can be looked
at and compared before anything runs. `server.TritonServer` does the rest.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from pipeline.contracts.launching import launch_facts
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.keeper import RestartPolicy
from pipeline.serving.ports import LOOPBACK, Listeners, Ports, check_container_ports
from pipeline.store import FileHashes
from pipeline.triton.deployment import Deployment

Target = Literal["local", "docker"]


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Machines over which mpirun spreads the ranks of one server.

    Attributes:
        hosts: Their names; the first is this one, which has rank 0.
        slots: Ranks of each machine, one a GPU.
        hostfile: File that names them to mpirun.
        ssh_config: Configuration of ssh, by which mpirun reaches the others.
    """

    hosts: tuple[str, ...]
    slots: int
    hostfile: str
    ssh_config: str


# Processes of an idle server end within this time.
ENDING_S = 30


def drain_s(stop_deadline_s: float) -> int:
    """Time that requests in flight have when a server is told to end: the rest is for its processes.

    Args:
        stop_deadline_s: until they are killed.

    >>> drain_s(10), drain_s(45), drain_s(120)
    (3, 15, 90)
    """
    return max(1, round(stop_deadline_s - min(ENDING_S, stop_deadline_s * 2 / 3)))


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve a package, as far as the package leaves it open.

    Attributes:
        ports: Ports at which others reach the server.
        address: Address of these ports.
        allowed_hosts: Names by which requests over HTTP may call this machine, besides those of loopback.
        log_file: What the server prints; None for a file in `logs`.
        start_deadline_s: Time to become ready; None for what the package's size asks for.
        stop_deadline_s: Time to end; `drain_s` of it is for requests in flight.
        health_interval_s: Time between checks by inference; 0 for no checks.
        hang_timeout_s: Time without an answer and without progress after which a server counts as hung; None for what
            the package asks for.
        running: Folder where servers are announced; None for no announcement.
        logs: Folder for the logs of all servers; None for the temporary folder.
        restart: When a server that failed is started again.
        target: None takes local for a CPU and inside a container with TensorRT-LLM, else docker.
        image: Image of the container; None for the one that the package was made for.
        devices: GPUs; empty for as many as the package needs.
        pull_deadline_s: Time in which the image must have been pulled.
        allowed: Rules of preflight whose errors do not stop the start.
        hashes: Remembers which of the package's files need not be read again.
        use: Keeps a package's folder from being collected as garbage while this process runs; false if it is gone.
        recipe: Words that name recipe and store on a command line; empty where only the package is known.
        settings: Values of the recipe, all of them; None where only the package is known.
        traces: Where an OTLP/HTTP receiver takes Triton's spans, as `traces_endpoint` makes it; None for no spans.
        group: Machines that share the ranks; None for this one alone.
    """

    ports: Ports
    address: str = LOOPBACK
    allowed_hosts: tuple[str, ...] = ()
    log_file: Path | None = None
    start_deadline_s: float | None = None
    stop_deadline_s: float = 10.0
    health_interval_s: float = 1.0
    hang_timeout_s: float | None = None
    running: Path | None = None
    logs: Path | None = None
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    target: Target | None = None
    image: str | None = None
    devices: tuple[int, ...] = ()
    pull_deadline_s: float = 3600.0
    allowed: frozenset[str] = frozenset()
    hashes: FileHashes = field(default_factory=lambda: FileHashes(None))
    use: Callable[[Path], bool] = Path.is_dir
    recipe: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None
    traces: str | None = None
    group: HostGroup | None = None

    def target_of(self, deployment: Deployment) -> Target:
        """Decide where a deployment is served.

        Raises:
            UserError: A container is wanted for one that is for a CPU, or for ports that it cannot have.
        """
        if deployment.requirements is None:
            if self.target == "docker":
                raise UserError(f"{deployment.name} is for this machine's CPU: no container serves it")
            return "local"
        # Who has the server of the containers is inside one.
        server = launch_facts(deployment.requirements.tensorrt_llm).server
        target: Target = self.target or ("local" if Path(server).exists() else "docker")
        if target == "docker":
            check_container_ports(self.ports)
        return target

    def image_of(self, deployment: Deployment) -> str:
        """The image of the container that serves a deployment for a GPU."""
        assert deployment.requirements is not None, "a deployment for a GPU has them"
        return self.image or deployment.requirements.image


def traces_endpoint(receiver: str | None = None) -> str | None:
    """Where spans go, by the rules of OpenTelemetry's OTLP exporters.

    Args:
        receiver: http://host:port of an OTLP/HTTP receiver; None takes the environment's.

    Returns:
        The URL of its traces; None if there is no receiver.
    """
    if receiver is None and (exact := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return exact
    receiver = receiver or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return f"{receiver.rstrip('/')}/v1/traces" if receiver else None


@dataclass(frozen=True, slots=True)
class Start:
    """One attempt to start a server.

    Attributes:
        stage: Folder of its own, removed at the end.
        listeners: Where Triton listens; a container has its own ports inside.
        shared_memory_prefix: Begins the names of its regions in /dev/shm, and is unique to this start.
        ports: Ports under which a container's are published; None for processes of this machine.
        address: Address of these.
        deadline_s: Time to become ready.
        drain_s: Time that requests under way have when the server is told to stop.
    """

    stage: Path
    listeners: Listeners
    shared_memory_prefix: str
    ports: Ports | None = None
    address: str = LOOPBACK
    deadline_s: float = 120.0
    drain_s: int = 5


class Launch(Protocol):
    """One start of a server."""

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its arguments."""

    @property
    def environment(self) -> dict[str, str]:
        """All that its process has around it."""

    @property
    def cleanup(self) -> tuple[str, ...]:
        """A command to run when it has ended, whichever way; none if empty."""

    @property
    def gave_up(self) -> tuple[str, ...]:
        """Phrases of its log after which it will not become ready, though it may still be there."""

    @property
    def synonyms(self) -> dict[str, str]:
        """Paths that its log speaks of -> what the user knows them as."""

    def prepare(self) -> None:
        """Make on disk what the command needs."""


class Launcher(Protocol):
    """A way to serve one package."""

    @property
    def local(self) -> bool:
        """Whether the server is processes of this machine, which share its files and can be looked at."""

    @property
    def attempts(self) -> int:
        """How often a start that a signal ended is made."""

    @property
    def noise(self) -> tuple[str, ...]:
        """Words of lines that its log calls errors though nothing is wrong."""

    def check(self) -> None:
        """Look for what would keep it from starting. Raises UserError."""

    def launch(self, start: Start) -> Launch:
        """What is run for one attempt."""


def check_models(repository: Path, models: Sequence[str]) -> None:
    """See that a model repository holds these models, and no other folder: Triton loads whatever lies there.

    Raises:
        InvalidInput: some are missing, or there are more; all of them.
    """
    found = {path.name for path in repository.iterdir() if path.is_dir()} if repository.is_dir() else set()
    missing = [
        Fault("is missing", where=str(repository), key=name, fix="build the package again")
        for name in models
        if name not in found
    ]
    stray = [
        Fault("is none of the deployment's models, and Triton would load it", where=str(repository), key=name,
              fix="move it away")
        for name in sorted(found - set(models))
    ]  # fmt: skip
    if missing or stray:
        raise InvalidInput("the model repository is not the one that was packaged", [*missing, *stray])


_TEXTS = (".pbtxt", ".yaml")  # files that name paths


def mirror(repository: Path, into: Path, *, root: tuple[str, Path] | None = None) -> None:
    """Show a server a model repository as another folder: fill `into` with folders, and links to the files.

    Python writes byte-code beside its sources (Triton's stub heeds no setting against that), which must not end up in
    the store, and Triton hands paths to a shell unquoted, so that the name of the repository's own folder may not
    matter.

    Args:
        root: what the paths in configurations begin with, and the folder that they mean here. Files that name it are
            copied with this one instead.

    Raises:
        UserError: the path of `into` is one that Triton cannot use.
    """
    if shlex.quote(str(into)) != str(into):
        raise UserError(f"{into}: Triton needs a temporary folder without spaces in its name: set TMPDIR")
    for folder, _, files in os.walk(repository):
        if "__pycache__" in folder:
            continue
        mirrored = into / Path(folder).relative_to(repository)
        mirrored.mkdir(parents=True)
        for name in files:
            _place(Path(folder, name), mirrored / name, root)


def _place(source: Path, target: Path, root: tuple[str, Path] | None) -> None:
    if root is not None and source.suffix in _TEXTS:
        named, here = root
        text = source.read_text(encoding="utf-8")
        if f"{named}/" in text:
            target.write_text(text.replace(f"{named}/", f"{here}/"), encoding="utf-8")
            return
    target.symlink_to(source.resolve())
