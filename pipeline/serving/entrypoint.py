"""What our container runs: check the manifest, start by the launch plan, warm up, then report ready.

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
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.dropping_output import drop_unwritable_output
from pipeline.errors import Fault, InvalidInput, PipelineError
from pipeline.keeper import RestartPolicy
from pipeline.printable import printable_bytes
from pipeline.private_files import owner_only
from pipeline.progress import Lines
from pipeline.serving.group import GroupMember, gather
from pipeline.serving.health import DEFAULT_FILE, FILE_VARIABLE
from pipeline.serving.launch import ServeOptions, traces_endpoint
from pipeline.serving.ports import ANYWHERE, GRPC, METRICS, Ports
from pipeline.serving.serve import serve
from pipeline.triton.deployment import CONTAINER_ROOT, Deployment

_FOLLOW_S = 0.2


@dataclass(frozen=True, slots=True)
class EntrypointSettings:
    """The environment variables, read."""

    package: Path
    address: str
    ports: Ports
    allowed_hosts: tuple[str, ...]
    start_deadline_s: float | None
    stop_deadline_s: float
    health_interval_s: float
    hang_timeout_s: float | None
    restart: RestartPolicy
    ready_file: Path

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> EntrypointSettings:
        """Raises InvalidInput: values that are no numbers; all of them."""
        faults: list[Fault] = []

        def number(name: str, otherwise: float) -> float:
            given = environment.get(name) or str(otherwise)
            try:
                value = float(given)
            except ValueError:
                value = -1
            if value < 0:
                faults.append(Fault("is not a number of at least 0", key=name, value=given))
            return value

        found = cls(
            package=Path(environment.get("PIPELINE_PACKAGE") or CONTAINER_ROOT),
            address=environment.get("PIPELINE_ADDRESS") or ANYWHERE,
            ports=Ports(
                http=int(number("PIPELINE_HTTP_PORT", 0)) or None,
                grpc=int(number("PIPELINE_GRPC_PORT", GRPC)),
                metrics=int(number("PIPELINE_METRICS_PORT", METRICS)),
            ),
            allowed_hosts=tuple(filter(None, environment.get("PIPELINE_ALLOWED_HOSTS", "").split(","))),
            start_deadline_s=number("PIPELINE_START_TIMEOUT_S", 0) or None,
            stop_deadline_s=number("PIPELINE_STOP_TIMEOUT_S", 45),
            health_interval_s=number("PIPELINE_HEALTH_INTERVAL_S", 1),
            hang_timeout_s=number("PIPELINE_HANG_TIMEOUT_S", 0) or None,
            restart=RestartPolicy(
                int(number("PIPELINE_MAX_RESTARTS", 5)),
                number("PIPELINE_RESTART_WINDOW_S", 300),
                gives_up=True,
            ),
            ready_file=Path(environment.get(FILE_VARIABLE) or DEFAULT_FILE),
        )
        if faults:
            raise InvalidInput("environment", faults)
        return found


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    if arguments:
        os.execvp(arguments[0], arguments)
    drop_unwritable_output()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = EntrypointSettings.read(os.environ)
        settings.ready_file.unlink(missing_ok=True)  # of a start before this one
        with owner_only(), tempfile.TemporaryDirectory(prefix="pipeline-log-") as folder:
            log = Path(folder) / "triton.log"
            with Following(log):
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
    options = ServeOptions(
        ports=settings.ports,
        address=settings.address,
        allowed_hosts=settings.allowed_hosts,
        log_file=log,
        start_deadline_s=settings.start_deadline_s,
        stop_deadline_s=settings.stop_deadline_s,
        health_interval_s=settings.health_interval_s,
        hang_timeout_s=settings.hang_timeout_s,
        restart=settings.restart,
        target="local",
        traces=traces_endpoint(),
        group=group,
    )
    serve([(settings.package, options)], Lines(), stop, ready_file=settings.ready_file)


class Following:
    """Copies a growing file to standard output while it is entered: the log of a container is what it prints."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="log", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(5)

    def _copy(self) -> None:
        position = 0
        while True:
            last = self._done.wait(_FOLLOW_S)
            if self._file.is_file():
                with self._file.open("rb") as file:
                    file.seek(position)
                    text = file.read()
                position += len(text)
                sys.stdout.buffer.write(printable_bytes(text))
                sys.stdout.flush()
            if last:
                return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
