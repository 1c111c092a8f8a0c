"""Records of running servers: one small JSON file for each recipe, so that clients find theirs by its name.

    <store>/running/<recipe>.json   the fields of `RunningServer`; rewritten whenever one of them changes
                    <recipe>.lock   held by its supervisor, so that there is one
                    <recipe>.sock   socket of the supervisor's commands (see `serving.control`)
                    targets/<recipe>.json   address of Triton's page of metrics, for Prometheus (`file_sd_configs`)
            logs/<recipe>/          output of Triton, the gateway and a detached supervisor

A file is only a hint: its writer may have been killed. `alive` therefore looks at the process. The file of a supervisor
that gave up stays, with the state `failed` and the reason.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pipeline.errors import ServerError
from pipeline.process_state import CLOCK_TICK_S, ProcessStat, boot_id, own_mark
from pipeline.reading import UnreadableFile, read_json

# starting     not ready yet since the supervisor began
# ready        a real inference went through every model, and the gateway answers
# unready      Triton may answer, but something is wrong (`reason`); it is being watched
# restarting   Triton is down, and is being started again
# failing      Triton is down, and failed too often: it is tried again from time to time
# draining     told to stop; requests under way are completed
# failed       the supervisor gave up and has ended
State = Literal["starting", "ready", "unready", "restarting", "failing", "draining", "failed"]
# Triton can be asked.
ANSWERING: frozenset[State] = frozenset({"ready", "unready", "draining"})
SUPERVISED: frozenset[State] = frozenset(get_args(State)) - {"failed"}

_POLL_S = 0.1
# A process that began so much later than its record is another one that got the same number.
_SLACK_S = 1.0
# The same for records of older versions, which know the time of day alone: the clock may have been set since.
_CLOCK_SLACK_S = 60.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that `pipeline serve` started.

    Attributes:
        pid: Process of `pipeline serve`, the supervisor; Triton and the gateway end with it.
        grpc_url: Triton's gRPC address, host:port; `grpc_socket` where no port is open.
        http_url: Triton's HTTP address; empty where it is off.
        metrics_url: Triton's page of metrics.
        deployment: File deployment.json of the package that is served.
        started: Time at which the supervisor began: ISO 8601, UTC.
        reason: Reason why the state is not `ready`; empty where it is.
        components: Component ("triton", "gateway") -> its state.
        restarts: Component -> number of its restarts.
        gateway_url: Address of the gateway, as http://host:port; empty without one.
        log: File with the output of Triton.
        gateway_log: File with the output of the gateway; None without one.
        control: Socket on which the supervisor takes commands; None if it takes none.
        recipe: Arguments of a command line that name the recipe and its store.
        previous: Package that `pipeline rollback` would take; None if there was no exchange.
        settings: All values of the recipe that it is served with, paths absolute; None where only the package is known.
            So it can be asked by its name when the recipe's file is elsewhere, changed or gone.
        boot_id: Start of the machine that `uptime_s` counts from.
        uptime_s: Seconds from there to the supervisor's beginning: the clock may be set while it runs.
        grpc_socket: GRPC target of Triton for processes of the same user, unix:PATH; empty where it has none.
        mark: Value of `process_state.SUPERVISOR` in the environment of all processes that the supervisor starts.
    """

    pid: int
    grpc_url: str
    http_url: str
    metrics_url: str
    deployment: Path
    started: str
    # Records of older versions were written when the server was ready, and have none of these.
    state: State = "ready"
    reason: str = ""
    components: Mapping[str, State] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    gateway_url: str = ""
    log: Path | None = None
    gateway_log: Path | None = None
    control: Path | None = None
    recipe: tuple[str, ...] = ()
    previous: Path | None = None
    settings: Mapping[str, Any] | None = None
    boot_id: str = ""
    uptime_s: float = 0.0
    grpc_socket: str = ""
    mark: str = ""

    @classmethod
    def of(cls, addresses: Mapping[str, str], package: Path, **more: Any) -> Self:
        """Make the record of a server that this process starts from `package`."""
        values: dict[str, Any] = {**addresses, **more}
        return cls(
            pid=os.getpid(),
            deployment=package.absolute() / "deployment.json",
            started=datetime.now(UTC).isoformat(timespec="milliseconds"),
            boot_id=boot_id(),
            uptime_s=round(time.clock_gettime(time.CLOCK_BOOTTIME), 3),
            mark=own_mark(),
            **values,
        )

    @classmethod
    def read(cls, folder: Path, name: str) -> Self | None:
        """Read the record of recipe `name`, None if there is none. The server may be gone: see `alive`."""
        file = _file(folder, name)
        try:
            data = read_json(file)
            datetime.fromisoformat(data["started"])
            if data.get("state", "ready") not in get_args(State):
                raise ValueError(f"state {data['state']!r}")
            known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
            paths = {name: Path(known[name]) for name in _PATHS if known.get(name) is not None}
            recipe = tuple(map(str, known.get("recipe", ())))
            return cls(**{**known, **paths, "pid": int(data["pid"]), "recipe": recipe})
        except (UnreadableFile, ValueError, TypeError, KeyError) as error:
            if isinstance(error.__cause__, FileNotFoundError) or not file.exists():
                return None
            raise ServerError(f"{file}: is not a record of a server ({error}); remove it") from error

    @classmethod
    def all(cls, folder: Path) -> dict[str, Self]:
        """Read all records, by the name of their recipe, also of servers that are gone."""
        records = {file.stem: cls.read(folder, file.stem) for file in sorted(folder.glob("[!.]*.json"))}
        return {name: record for name, record in records.items() if record is not None}

    @classmethod
    def find(
        cls, folder: Path, name: str, *, wait_s: float = 0.0, states: Collection[State] = ANSWERING
    ) -> Self | None:
        """Find the server of a recipe that is running; None if there is none within `wait_s`.

        Args:
            states: States that will do: by default those in which Triton can be asked; `SUPERVISED` for every server
                whose supervisor lives.
        """
        deadline = time.monotonic() + wait_s
        while True:
            record = cls.read(folder, name)
            if record is not None and record.state in states and record.alive:
                return record
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Values of `--set` that the recipe's file is served with, those of rollouts included."""
        return tuple(value for option, value in pairwise(self.recipe) if option == "--set")

    @property
    def target(self) -> str:
        """gRPC target for this process: the socket if it may use it, which no other user can stand in for."""
        # The socket itself is gone while Triton is started again; its folder stays.
        folder = os.path.dirname(self.grpc_socket.removeprefix("unix:"))
        return self.grpc_socket if folder and os.access(folder, os.X_OK) else self.grpc_url

    @property
    def alive(self) -> bool:
        """Whether the process that wrote this is still there, and no other under its number."""
        process = ProcessStat.of(self.pid)
        if process is None:
            return False
        began = process.start * CLOCK_TICK_S
        if self.boot_id:
            return self.boot_id == boot_id() and began <= self.uptime_s + _SLACK_S
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot + began <= datetime.fromisoformat(self.started).timestamp() + _CLOCK_SLACK_S

    def write(self, folder: Path, name: str) -> None:
        """Publish at once: a reader sees the old file or the new one, never half of it."""
        _publish(_file(folder, name), self.as_json())
        target = [{"targets": [urlsplit(self.metrics_url).netloc], "labels": {"deployment": name}}]
        _publish(metrics_targets(folder, name), target)

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        data = asdict(self)
        return {key: str(value) if isinstance(value, Path) else value for key, value in data.items()}

    def remove(self, folder: Path, name: str) -> None:
        """Take the record back, unless another server has replaced it.

        The file for Prometheus stays, so that it tells that the target is down.
        """
        if self.read(folder, name) == self:
            _file(folder, name).unlink(missing_ok=True)


_PATHS = ("deployment", "log", "gateway_log", "control", "previous")


def metrics_targets(folder: Path, name: str) -> Path:
    """Return the file that names Triton's page of metrics to Prometheus, also after a rollout has moved it."""
    return folder / "targets" / f"{name}.json"


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _publish(file: Path, value: object) -> None:
    """Replace a file by a JSON document at once; one that says the same stays as it is."""
    text = json.dumps(value, indent=2) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.stem}.{secrets.token_hex(4)}")
    try:
        if file.is_file() and file.read_text("utf-8") == text:
            return
        draft.write_text(text, "utf-8")
        draft.replace(file)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
