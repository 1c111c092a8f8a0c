"""Deployments of a store, seen from outside: listed, watched, stopped, for `pipeline ps`, `top` and `stop`.

A record is only a hint (`triton.running`), so each is held against its process, its supervisor's socket, its package
and its pages of metrics. Each wait is at most a second or two, and all are asked at the same time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import PipelineError, ServerError, StoreError
from pipeline.machine.process_guard import kill_marked, marked
from pipeline.process_state import SUPERVISOR
from pipeline.serving.control import Say, ask
from pipeline.serving.live import DeploymentPages, LiveFigures, memory_bytes
from pipeline.store import lock
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import RunningServer, State

# Rates and latencies of `LiveView` are those of so many seconds.
_WINDOW_S = 10.0
_ANSWER_S = 2.0
_POLL_S = 0.1
# A supervisor that is told to stop by SIGTERM, or killed, is gone so soon after.
_KILLED_S = 10.0
# Processes that a killed supervisor leaves end by themselves within so long: the guard ends Triton.
_LEFT_S = 30.0


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """One deployment, as it is now.

    Attributes:
        record: Record that its supervisor wrote.
        state: State of the record; "lost" where the supervisor has ended without having said so.
        reason: Reason why the state is not "ready".
        pids: Component -> its processes; empty where the supervisor does not answer. "remaining" has those that a
            supervisor left which has ended.
        deployment: Content of the package's deployment.json; None where it cannot be read.
        uptime_s: Time since the supervisor began; None where it is gone.
        memory_bytes: Memory of all its processes; None where they are gone.
    """

    name: str
    record: RunningServer
    state: State | Literal["lost"]
    reason: str
    pids: Mapping[str, Sequence[int]]
    deployment: Deployment | None
    figures: LiveFigures
    uptime_s: float | None
    memory_bytes: int | None
    pages: DeploymentPages

    @property
    def alive(self) -> bool:
        """Whether its supervisor runs."""
        return self.uptime_s is not None

    def as_json(self) -> dict[str, Any]:
        """Make a value for `json.dumps`: the record, and what was found besides."""
        deployment = self.deployment
        served = None if deployment is None else {
            "digest": deployment.digest,
            "runtime": deployment.runtime,
            "entry_model": deployment.entry_model,
            "models": list(deployment.models),
        }  # fmt: skip
        return {
            "name": self.name,
            **self.record.as_json(),
            "state": self.state,
            "reason": self.reason,
            "package": str(self.record.deployment.parent),
            "served": served,
            "pids": {component: list(pids) for component, pids in self.pids.items()},
            "uptime_s": None if self.uptime_s is None else round(self.uptime_s, 1),
            "memory_bytes": self.memory_bytes,
            "figures": asdict(self.figures),
        }


def list_deployments(
    running: Path, names: Collection[str] = (), earlier: Mapping[str, DeploymentPages] | None = None
) -> tuple[DeploymentStatus, ...]:
    """Look at the deployments that are announced in a store, sorted by name; `forget` removes those that are gone.

    Args:
        earlier: Name -> pages from which rates and latencies count. Without, there are no rates, and latencies are
            those since the start.
    """
    records = {
        name: record for name, record in RunningServer.all(running).items() if not names or name in names
    }
    if not records:
        return ()
    before = earlier or {}
    with ThreadPoolExecutor(min(16, len(records))) as pool:
        return tuple(pool.map(lambda name: _look(name, records[name], before.get(name)), records))


class LiveView:
    """Looks at the deployments of a store again and again, and keeps what rates and latencies need."""

    def __init__(self, running: Path, names: Collection[str] = ()) -> None:
        """See `list_deployments`; latencies and rates are those of the last ten seconds."""
        self._running, self._names = running, names
        self._pages: dict[str, deque[DeploymentPages]] = defaultdict(deque)

    def look(self) -> tuple[DeploymentStatus, ...]:
        """Read all pages once more."""
        deployments = list_deployments(
            self._running, self._names, {name: pages[0] for name, pages in self._pages.items()}
        )
        for status in deployments:
            pages = self._pages[status.name]
            pages.append(status.pages)
            while len(pages) > 1 and status.pages.taken_s - pages[1].taken_s >= _WINDOW_S:
                pages.popleft()
        return deployments


def _look(name: str, record: RunningServer, earlier: DeploymentPages | None) -> DeploymentStatus:
    try:
        deployment = Deployment.load(record.deployment.parent)
    except PipelineError:
        deployment = None
    if not record.alive:
        return _ended_status(name, record, deployment)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_supervisor_says, name, record)
        pages = DeploymentPages.fetch(record.metrics_url, record.gateway_url or None, _ANSWER_S)
        pids, silence = answer.result()
    uptime = datetime.now(UTC) - datetime.fromisoformat(record.started)
    return DeploymentStatus(
        name=name,
        record=record,
        state=record.state if not silence else "unready",
        reason=silence or record.reason,
        pids=pids,
        deployment=deployment,
        figures=LiveFigures.read(name, pages, earlier),
        uptime_s=max(0.0, uptime.total_seconds()),
        memory_bytes=memory_bytes(record.pid),
        pages=pages,
    )


def _ended_status(name: str, record: RunningServer, deployment: Deployment | None) -> DeploymentStatus:
    """Describe a deployment whose supervisor has ended."""
    state: State | Literal["lost"] = "failed"
    reason, remaining = record.reason, remaining_processes(record)
    if record.state != "failed":
        state, reason = "lost", f"process {record.pid} has ended without saying why"
        if remaining:
            reason += (
                f"; of its processes {', '.join(map(str, remaining))} still run, which `pipeline stop` ends"
            )
        reason += f"; before that, {record.reason}" if record.reason else ""
        reason += f"; a unit of `pipeline deploy {name} --target systemd` would start it again"
    pids, pages = {"remaining": remaining} if remaining else {}, DeploymentPages(None, None)
    return DeploymentStatus(name, record, state, reason, pids, deployment, LiveFigures(), None, None, pages)


def _supervisor_says(name: str, record: RunningServer) -> tuple[Mapping[str, Sequence[int]], str]:
    """Ask for the processes of each component. Returns them, and the reason if they are not known."""
    if record.control is None:
        return {}, ""
    try:
        status = ask(record.control, "status", timeout_s=_ANSWER_S)
    except PipelineError as error:
        # It may have ended since its record was read.
        return {}, str(error) if record.alive else ""
    return status["deployments"].get(name, {}).get("pids", {}), ""


def remaining_processes(record: RunningServer) -> tuple[int, ...]:
    """List running processes that a supervisor has started; none for a record of an older version."""
    return tuple(sorted(marked(record.mark, SUPERVISOR))) if record.mark else ()


def end_remaining(record: RunningServer, say: Say) -> tuple[int, ...]:
    """End processes that a supervisor left: wait until the guard has ended Triton, then kill those that are late.

    Returns:
        Processes that run all the same.
    """
    remaining, deadline = remaining_processes(record), time.monotonic() + _LEFT_S
    if remaining:
        say(f"waiting for the end of the processes {', '.join(map(str, remaining))}")
    for pid in remaining:
        # One that is stopped would not end.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGCONT)
    while remaining and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        remaining = remaining_processes(record)
    if remaining:
        kill_marked(record.mark, SUPERVISOR)
    return remaining_processes(record)


def forget(running: Path, status: DeploymentStatus, *, wait_s: float = 0.0) -> None:
    """Remove the record of a deployment that is gone, unless it is served again meanwhile.

    Threads of a supervisor that was just killed may still hold its lock, which is waited for.
    """
    deadline = time.monotonic() + wait_s
    try:
        while (acquired := lock.exclusive(running / f"{status.name}.lock")) is None:
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)
    except (OSError, StoreError):
        return
    try:
        status.record.remove(running, status.name)
        (running / f"{status.name}.sock").unlink(missing_ok=True)
    except OSError:
        # A store that is only read keeps it.
        return
    finally:
        acquired.release()


@dataclass(frozen=True, slots=True)
class StoppedDeployment:
    """End of one supervisor and the deployments that it served.

    Attributes:
        how: "drained" if the requests under way were completed, "killed" if they were not in time.
        remaining: Processes of it that do not end, even when they are killed.
    """

    names: tuple[str, ...]
    pid: int
    how: Literal["drained", "killed"]
    remaining: tuple[int, ...] = ()


def stop_deployments(
    records: Mapping[str, RunningServer], timeout_s: float, say: Say
) -> Iterator[StoppedDeployment]:
    """Stop supervisors, each with all deployments that it serves: ask, then end, and kill those that are late.

    Args:
        records: Name -> record of a deployment whose supervisor lives; deployments of one supervisor may all be there.
        timeout_s: Time for requests under way, for each supervisor.

    Yields:
        Each supervisor, as soon as it has ended, and all that it had started.

    Raises:
        ServerError: A supervisor belongs to another user.
    """
    supervisors = {record.pid: record for record in records.values()}
    for pid, record in supervisors.items():
        names = tuple(name for name, other in records.items() if other.pid == pid)
        if record.control is None:
            _signal(record, signal.SIGTERM)
        else:
            threading.Thread(target=_ask_to_stop, args=(record, say), name="stop", daemon=True).start()
        how: Literal["drained", "killed"] = "drained" if _ended(record, timeout_s) else "killed"
        if how == "killed":
            _signal(record, signal.SIGKILL)
        late = () if _ended(record, _KILLED_S) else (pid,)
        yield StoppedDeployment(names, pid, how, (*late, *end_remaining(record, say)))


def _ask_to_stop(record: RunningServer, say: Say) -> None:
    assert record.control is not None, "the caller looked"
    try:
        ask(record.control, "stop", on_progress=say)
    except PipelineError:
        # It does not listen any more: a signal says the same.
        _signal(record, signal.SIGTERM)


def _signal(record: RunningServer, number: signal.Signals) -> None:
    try:
        if record.alive:
            os.kill(record.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise ServerError(f"process {record.pid} belongs to another user") from None


def _ended(record: RunningServer, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while record.alive:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
