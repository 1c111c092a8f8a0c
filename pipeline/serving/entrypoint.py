"""Main program of our container: check the manifest, start by the launch plan, warm up, then report ready.

    python -m pipeline.serving.entrypoint              serve $PIPELINE_PACKAGE (/deployment)
    python -m pipeline.serving.entrypoint COMMAND…     run something else instead, as NVIDIA's images do

A server that dies or hangs is started again, as `pipeline serve` does it. One that fails too often ends the container,
in which nothing else runs that this could harm: whoever runs the container starts it again, on another machine if that
helps. It ends with 2 when the machine does not fit the package or the package is damaged (its files are hashed while
the server loads them, and it is not ready before that has ended), with 1 when the server does not start or failed too
often, and with 0 when it was told to stop. Settings are environment variables, because a container's are:

    PIPELINE_PACKAGE             folder with deployment.json; /deployment
    PIPELINE_ADDRESS             where to listen; 0.0.0.0
    PIPELINE_GRPC_PORT, PIPELINE_METRICS_PORT      8001, 8002
    PIPELINE_HTTP_PORT           opens HTTP, at this port; by default it is off
    PIPELINE_ALLOWED_HOSTS       names by which requests over HTTP may call this container, with commas between them
    PIPELINE_START_TIMEOUT_S     time to become ready; what the package's size asks for
    PIPELINE_STOP_TIMEOUT_S      time to end, all but 30 s of it for requests in flight (below 45 a third); 45
    PIPELINE_HEALTH_INTERVAL_S   time between checks by inference; 1, 0 makes none
    PIPELINE_HANG_TIMEOUT_S      time without an answer and without progress after which a model counts as hung
    PIPELINE_MAX_RESTARTS        restarts within the window; the failure after them ends it; 5
    PIPELINE_RESTART_WINDOW_S    failures that are older do not count; 300
    PIPELINE_READY_FILE          there while it is ready; /tmp/pipeline/ready.json
    PIPELINE_GROUP_GPUS          GPUs of each machine, where LeaderWorkerSet says that several share the ranks
    PIPELINE_VERIFY_KEY          file of public keys, by one of which the package must be signed (`pipeline store sign`)
    PIPELINE_SSH_FOLDER          key by which they reach each other; /etc/pipeline/ssh (see `pipeline.serving.group`)
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import NonNegativeFloat, NonNegativeInt, ValidationError

from pipeline.dropping_output import drop_unwritable_output
from pipeline.errors import Fault, InvalidInput, PipelineError
from pipeline.keeper import RestartPolicy
from pipeline.printable import printable
from pipeline.private_files import owner_only
from pipeline.progress import Lines
from pipeline.recipe import TritonSection
from pipeline.serving.group import GroupMember, gather
from pipeline.serving.health import DEFAULT_FILE
from pipeline.serving.launch import HostGroup, ServeOptions, traces_endpoint
from pipeline.serving.log_files import LogTail
from pipeline.serving.ports import ANYWHERE, GRPC, METRICS, Ports
from pipeline.serving.serve import serve, stop_on_signals
from pipeline.settings import Settings
from pipeline.triton.deployment import CONTAINER_ROOT, Deployment

_FOLLOW_S = 0.2


class EntrypointSettings(Settings):
    """Environment variables of the container: PIPELINE_ and the name of a field in capitals. 0 means the default."""

    package: Path = Path(CONTAINER_ROOT)
    address: str = ANYWHERE
    http_port: NonNegativeInt = 0
    grpc_port: NonNegativeInt = GRPC
    metrics_port: NonNegativeInt = METRICS
    allowed_hosts: str = ""
    start_timeout_s: NonNegativeFloat = 0
    stop_timeout_s: NonNegativeFloat = 45
    health_interval_s: NonNegativeFloat = 1
    hang_timeout_s: NonNegativeFloat = 0
    max_restarts: NonNegativeInt = 5
    restart_window_s: NonNegativeFloat = 300
    ready_file: Path = Path(DEFAULT_FILE)

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> EntrypointSettings:
        """Raises InvalidInput: values that are no numbers; all of them."""
        variables = {name: f"PIPELINE_{name.upper()}" for name in cls.model_fields}
        values = {
            name: environment[variable] for name, variable in variables.items() if environment.get(variable)
        }
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            names = [str(detail["loc"][0]) for detail in error.errors()]
            faults = [
                Fault("is not a number of at least 0", key=variables[name], value=values[name])
                for name in names
            ]
            raise InvalidInput("environment", faults) from None

    def options(self, log: Path, group: HostGroup | None) -> ServeOptions:
        """Options of the server.

        Args:
            log: File that gets Triton's log.
            group: Machines that share the ranks; None for this one alone.
        """
        # Limits of recipes are no limits here.
        triton = TritonSection.model_construct(
            address=self.address,
            start_timeout_s=self.start_timeout_s or None,
            container=False,
            log=log,
            health_interval_s=self.health_interval_s,
            hang_timeout_s=self.hang_timeout_s or None,
        )
        return ServeOptions(
            Ports(self.http_port or None, self.grpc_port, self.metrics_port),
            triton,
            restart=RestartPolicy(self.max_restarts, self.restart_window_s, gives_up=True),
            stop_deadline_s=self.stop_timeout_s,
            allowed_hosts=tuple(filter(None, self.allowed_hosts.split(","))),
            traces=traces_endpoint(),
            group=group,
        )


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    if arguments:
        os.execvp(arguments[0], arguments)
    drop_unwritable_output()
    stop = stop_on_signals()
    try:
        settings = EntrypointSettings.read(os.environ)
        # One of an earlier start.
        settings.ready_file.unlink(missing_ok=True)
        with owner_only(), tempfile.TemporaryDirectory(prefix="pipeline-log-") as folder:
            log = Path(folder) / "triton.log"
            with following(log):
                _serve(settings, log, stop)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _serve(settings: EntrypointSettings, log: Path, stop: threading.Event) -> None:
    member, group = GroupMember.read(os.environ), None
    if member is not None:
        print(f"waiting for {', '.join(member.hosts[1:])}", flush=True)
        group = gather(member, Deployment.load(settings.package).start_deadline_s, stop.is_set)
    serve([(settings.package, settings.options(log, group))], Lines(), stop, ready_file=settings.ready_file)


@contextmanager
def following(file: Path) -> Iterator[None]:
    """Copy a growing file to standard output, over its rotations: the log of a container is what it prints."""
    tail, done = LogTail({"triton": file}, sys.maxsize), threading.Event()

    def copy() -> None:
        while not done.wait(_FOLLOW_S):
            show(tail.read())
        show([*tail.read(), *tail.close()])

    def show(lines: Iterable[tuple[str, str]]) -> None:
        for _, line in lines:
            sys.stdout.buffer.write(f"{printable(line, colours=True)}\n".encode())
        sys.stdout.flush()

    thread = threading.Thread(target=copy, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
