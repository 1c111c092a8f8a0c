"""A start of a Triton server as a value, and the settings that it is made from.

For each attempt, a `Launcher` makes a `Launch` from a `Start`; it can be looked at before anything runs.
`server.TritonServer` runs it. The launchers are `launch_embedded.embedded_launch`, `launch_gpu.gpu_launch` and
`launch_docker.docker_launch`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.contracts.launching import launch_facts
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.keeper import RestartPolicy
from pipeline.recipe import TritonSection
from pipeline.serving.ports import LOOPBACK, Listeners, Ports, check_container_ports
from pipeline.store import Artifact, FileHashes, Manifest, Store
from pipeline.triton.deployment import Deployment

Target = Literal["local", "docker"]


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Machines over which mpirun spreads the ranks of one server, and the files by which it knows and reaches them.

    Attributes:
        hosts: Their names; the first is this one, which has rank 0.
        slots: Ranks of each machine, one for each GPU.
    """

    hosts: tuple[str, ...]
    slots: int
    hostfile: str
    ssh_config: str


# Processes of an idle server end within this time.
ENDING_S = 30


def drain_s(stop_deadline_s: float) -> int:
    """Return the part of the time to stop that requests in flight have; the rest is for the server's processes.

    >>> drain_s(10), drain_s(45), drain_s(120)
    (3, 15, 90)
    """
    return max(1, round(stop_deadline_s - min(ENDING_S, stop_deadline_s * 2 / 3)))


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Settings of one package that is served, and what is known of it besides.

    Attributes:
        ports: Ports at which others reach the server; those of `triton` were asked for, and these were chosen.
        store: Store where the server is announced and keeps its logs; None for no announcement, and logs in the
            temporary folder.
        stop_deadline_s: Time to end; `drain_s` of it is for requests in flight.
        allowed_hosts: Names by which requests over HTTP may call this machine, besides those of loopback.
        allowed: Rules of preflight whose errors do not stop the start.
        recipe: Arguments of a command line that name recipe and store; empty where only the package is known.
        settings: All values of the recipe; None where only the package is known.
        traces: URL of an OTLP/HTTP receiver of Triton's spans, as `traces_endpoint` makes it; None for no spans.
        group: Machines that share the ranks; None for this one alone.
    """

    ports: Ports
    triton: TritonSection = field(default_factory=TritonSection)
    gpus: tuple[int, ...] = ()
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    store: Store | None = None
    stop_deadline_s: float = 10.0
    allowed_hosts: tuple[str, ...] = ()
    allowed: frozenset[str] = frozenset()
    recipe: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None
    traces: str | None = None
    group: HostGroup | None = None

    @property
    def running(self) -> Path | None:
        """Folder where servers are announced."""
        return None if self.store is None else self.store.running

    @property
    def hashes(self) -> FileHashes:
        """Memory of the package's files that need not be read again."""
        return FileHashes(None) if self.store is None else self.store.hashes

    def use(self, package: Path) -> bool:
        """Keep a package of the store from being collected as garbage while this process runs; false if it is gone."""
        if self.store is None or package.parent != self.store.artifacts or not package.is_dir():
            return package.is_dir()
        return self.store.use(Artifact(package, Manifest.load(package)))

    def start_deadline_s(self, deployment: Deployment) -> float:
        """Time to become ready, in seconds: the one of the settings, or what the package's size asks for."""
        return self.triton.start_timeout_s or deployment.start_deadline_s

    def target_of(self, deployment: Deployment) -> Target:
        """Decide where a deployment is served: the settings say so, else the CPU and TensorRT-LLM's own container.

        Raises:
            UserError: A container is wanted for a deployment on a CPU, or for ports that it cannot have.
        """
        container = self.triton.container
        if deployment.requirements is None:
            if container:
                raise UserError(f"{deployment.name} is for this machine's CPU: no container serves it")
            return "local"
        if container is None:
            # A process that sees the server of the containers is inside a container.
            server = launch_facts(deployment.requirements.tensorrt_llm).server
            container = not Path(server).exists()
        if container:
            check_container_ports(self.ports)
        return "docker" if container else "local"

    def image_of(self, deployment: Deployment) -> str:
        """Image of the container that serves a deployment for a GPU."""
        assert deployment.requirements is not None, "a deployment for a GPU has them"
        return self.triton.image or deployment.requirements.image


def traces_endpoint(receiver: str | None = None) -> str | None:
    """Return the URL that spans are sent to, by the rules of OpenTelemetry's OTLP exporters; None for no spans.

    Args:
        receiver: http://host:port of an OTLP/HTTP receiver; None takes the environment's.
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
        listeners: Addresses on which Triton listens; a container has its own ports inside.
        shared_memory_prefix: Beginning of the names of its regions in /dev/shm, unique to this start.
        ports: Ports under which a container's are published; None for processes of this machine.
        address: Address of these ports.
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


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that starts a server, and what goes with it.

    Attributes:
        command: Program and arguments.
        environment: Variables besides those of this process.
        prepare: Makes on disk what the command needs; raises UserError with what would keep it from starting.
        cleanup: Command to run when the server has ended, whichever way; none if empty.
        attempts: Number of attempts, where a signal ends a start.
        gave_up: Phrases of its log after which it will not become ready, though it may still be there.
        noise: Words of lines that its log calls errors though nothing is wrong.
        synonyms: Path that its log shows -> the path that the user knows.
        ranks: Servers that the command starts.
        shm_mib: Shared memory that the servers of one machine need; 0 where that was not worked out.
        programs: Programs that the command runs.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[], None] = field(default=_nothing, compare=False)
    cleanup: tuple[str, ...] = ()
    attempts: int = 1
    gave_up: tuple[str, ...] = field(default=(), repr=False)
    noise: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    shm_mib: int = 0
    programs: tuple[str, ...] = ()


Launcher = Callable[[Start], Launch]


def check_models(repository: Path, models: Sequence[str]) -> None:
    """Check that a model repository holds these models, and no other folder: Triton loads whatever lies there.

    Raises:
        InvalidInput: Some are missing, or there are more; it names all of them.
    """
    folders = {path.name for path in repository.iterdir() if path.is_dir()} if repository.is_dir() else set()
    missing = [
        Fault("is missing", where=str(repository), key=name, fix="build the package again")
        for name in models
        if name not in folders
    ]
    stray = [
        Fault("is none of the deployment's models, and Triton would load it", where=str(repository), key=name,
              fix="move it away")
        for name in sorted(folders - set(models))
    ]  # fmt: skip
    if missing or stray:
        raise InvalidInput("the model repository is not the one that was packaged", [*missing, *stray])


# Endings of files that name paths.
_TEXTS = (".pbtxt", ".yaml")


def mirror(repository: Path, into: Path, *, root: tuple[str, Path] | None = None) -> None:
    """Show a server a model repository as another folder: fill `into` with folders, and links to the files.

    Python writes byte-code beside its sources (Triton's stub heeds no setting against that), which must not end up in
    the store, and Triton hands paths to a shell unquoted, so that the name of the repository's own folder may not
    matter.

    Args:
        root: Beginning of the paths in configurations, and the folder that it means here. Files that name it are
            copied with this one instead.

    Raises:
        UserError: Triton cannot use the path of `into`.
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
        named, root_path = root
        text = source.read_text(encoding="utf-8")
        if f"{named}/" in text:
            target.write_text(text.replace(f"{named}/", f"{root_path}/"), encoding="utf-8")
            return
    target.symlink_to(source.resolve())
