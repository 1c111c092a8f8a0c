"""Which servers of this store are running: one small JSON file a recipe, so that clients find theirs by its name.

    <store>/running/<recipe>.json   {"pid", "grpc_url", "http_url", "metrics_url", "deployment", "started"}

A file is only a hint: whoever wrote it may have been killed. `alive` therefore looks at the process.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, Self

from pipeline.errors import ServerError
from pipeline.reading import UnreadableFile, read_json

_POLL_S = 0.1
# A process that began so much later than its record is another one that got the same number.
_CLOCK_SLACK_S = 60.0  # the clock may have been set since


class Addresses(Protocol):
    """What a record needs to know of a server."""

    @property
    def grpc_url(self) -> str: ...
    @property
    def http_url(self) -> str: ...
    @property
    def metrics_url(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that `pipeline serve` started."""

    pid: int  # of `pipeline serve`; Triton ends with it
    grpc_url: str  # host:port
    http_url: str
    metrics_url: str
    deployment: Path  # its deployment.json
    started: str  # ISO 8601, UTC

    @classmethod
    def of(cls, server: Addresses, package: Path) -> Self:
        """The record of a server that this process has just started from `package`."""
        return cls(
            pid=os.getpid(),
            grpc_url=server.grpc_url,
            http_url=server.http_url,
            metrics_url=server.metrics_url,
            deployment=package.absolute() / "deployment.json",
            started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )

    @classmethod
    def read(cls, folder: Path, name: str) -> Self | None:
        """The record of recipe `name`, None if there is none. The server may be gone: see `alive`."""
        file = _file(folder, name)
        try:
            data = read_json(file)
            datetime.fromisoformat(data["started"])
            return cls(**{**data, "pid": int(data["pid"]), "deployment": Path(data["deployment"])})
        except (UnreadableFile, ValueError, TypeError, KeyError) as error:
            if not file.exists():
                return None
            raise ServerError(f"{file}: is not a record of a server ({error}); remove it") from error

    @classmethod
    def find(cls, folder: Path, name: str, *, wait_s: float = 0.0) -> Self | None:
        """The server of recipe `name` that is running now, or that is ready within `wait_s`; None if there is none."""
        deadline = time.monotonic() + wait_s
        while True:
            found = cls.read(folder, name)
            if found is not None and found.alive:
                return found
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)

    @property
    def alive(self) -> bool:
        """Whether the process that wrote this is still there, and no other under its number."""
        began = _process_start(self.pid)
        return (
            began is not None and began <= datetime.fromisoformat(self.started).timestamp() + _CLOCK_SLACK_S
        )

    def write(self, folder: Path, name: str) -> None:
        """Publish at once: a reader sees the old file or the new one, never half of it."""
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{name}.{secrets.token_hex(4)}"
        draft.write_text(
            json.dumps({**asdict(self), "deployment": str(self.deployment)}, indent=2) + "\n", "utf-8"
        )
        draft.replace(_file(folder, name))

    def remove(self, folder: Path, name: str) -> None:
        """Take the record back, unless another server has replaced it."""
        if self.read(folder, name) == self:
            _file(folder, name).unlink(missing_ok=True)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _process_start(pid: int) -> float | None:
    """Seconds since the epoch when a process began; None if there is none, or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    if fields[0] in "ZX":
        return None
    booted = next(int(line.split()[1]) for line in boot.splitlines() if line.startswith("btime "))
    return booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
