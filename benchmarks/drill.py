"""Every kind of process of a deployment killed and stopped under load: how soon it is back, and what clients see.

    python benchmarks/drill.py [tiny-cpu] [--times 25] [--streams 16] [--kind tensorrt_llm …] [--signal KILL …]
                               [--workers 2] [--json]

Builds the recipe if need be, starts `pipeline serve` with its gateway, and asks it all the time for answers that are
known beforehand: greedy ones, three of four streamed. Then it sends SIGKILL, or SIGSTOP, to one process after the other
(Triton, the stub of each Python model, the guard that ends Triton with its supervisor, the gateway and, where it has
several, one of its workers), and waits until the deployment is well again before the next: the process has been
replaced, /readyz says so, and an answer is right; a worker has been replaced when as many as before listen.

Last it kills the supervisor itself, `pipeline serve --detach` with nobody above it. Nothing starts that again but a
service manager, and this program does what one would: it waits until no process of the deployment is left, and runs
the command once more. A supervisor that is stopped is not among the cases: what it watches goes on without it.

Each answer is counted in one way:

    right       complete, and every character as expected
    error       ended with an error that says so, by its status or within the stream; what had come before was right
    cut         the connection ended without `[DONE]`. Honest only where the gateway, a worker of it or the supervisor
                is the victim
    refused     there was nobody to connect to. Honest only where the supervisor is the victim, which holds the port
    wrong       anything else that came: other text, `[DONE]` after a part, a connection that a gateway that is well cut
    hung        nothing came for `--hung-s` seconds

Of the streams that had begun when their server was lost, the gateway counts those that went on where their client was
(`saved`, they are among the right ones) and those that ended with an error (`ended`). Before each signal all answers
that were in flight at the one before have ended: what is in flight at two losses may be their cause, and is refused.

Figures are seconds from the signal: `noticed` until /readyz says that the model is not ready (which a stub that is not
in the path of a request does not change), `recovery` until all is well again; `ready lag` is from the supervisor's
record saying `ready` to /readyz saying it. "asked again" are attempts that the gateway repeated.

Exit code 1 if anything was wrong or hung, or did not come back within `--recovery-s`. The supervisor's window is made
short (`triton.restart_window_s: 1`), so that failures which are meant do not make it pause, or give up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import markdown, serving
from benchmarks.known_answers import BETWEEN_S, POLL_S, KnownAnswerLoad
from pipeline.bench.statistics import percentile
from pipeline.machine.processes import processes_below
from pipeline.recipe import load_recipe
from pipeline.serving.served import ServedDeployment
from pipeline.store import Store
from pipeline.triton.running import RunningServer

KINDS = (
    "tensorrt_llm",
    "tensorrt_llm_bls",
    "preprocessing",
    "postprocessing",
    "tritonserver",
    "guard",
    "gateway",
)
WORKER = "worker"  # of a gateway that has several
SUPERVISOR = "serve"
SIGNALS = ("KILL", "STOP")
START_S = 180


@dataclass
class Row:
    """Figures of one kind of process and one signal; seconds from the signal, one value for each time."""

    kind: str
    signal: str
    times: int = 0
    noticed_s: list[float] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    ready_lag_s: list[float] = field(default_factory=list)
    lost: int = 0  # did not come back in time
    asked_again: int = 0
    saved: int = 0
    ended: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> bool:
        return bool(self.answers["wrong"] or self.answers["hung"] or self.lost)


class Drill:
    """One deployment, its processes, and its state as seen from outside.

    Args:
        first: Process that the others descend from.
        url: Address of the gateway.
    """

    def __init__(
        self, first: int, url: str, store: Store, name: str, load: KnownAnswerLoad, *, workers: int = 1
    ) -> None:
        self._first, self._store, self._name, self._load = first, store, name, load
        self._workers = workers
        self._client = httpx.AsyncClient(base_url=url, timeout=1.0, trust_env=False)

    async def strike(self, row: Row, number: signal.Signals, recovery_s: float) -> None:
        """Send a signal to a process, and wait until all is well again."""
        (old, *_) = self._pids(row.kind)
        os.kill(old, number)
        began = time.monotonic()
        row.times += 1
        noticed = recorded = None
        while (now := time.monotonic()) < began + recovery_s:
            record = RunningServer.read(self._store.running, self._name)
            if record is None or record.state != "ready":
                recorded = None
            elif recorded is None:
                recorded = now
            ready = await self._is_ready()
            if not ready and noticed is None:
                noticed = time.monotonic()
                row.noticed_s.append(noticed - began)
            if (
                ready
                and await self._is_replaced(row.kind, old)
                and record is not None
                and record.state == "ready"
            ):
                well = time.monotonic()
                if await self._load.is_right():
                    row.recovery_s.append(well - began)
                    if row.kind != WORKER:
                        # The supervisor's record says nothing of workers.
                        row.ready_lag_s.append(max(0.0, well - (recorded or well)))
                    break
            await asyncio.sleep(POLL_S)
        else:
            row.lost += 1

    async def strike_supervisor(self, row: Row, again: Detached, recovery_s: float) -> None:
        """Kill the supervisor, wait until nothing of the deployment is left, and start it again."""
        family = [psutil.Process(process.pid) for process in processes_below(again.pid)]
        os.kill(again.pid, signal.SIGKILL)
        began = time.monotonic()
        row.times += 1
        noticed = False
        while any(_runs(process) for process in family):
            if time.monotonic() > began + recovery_s:
                row.lost += 1
                return
            if not noticed and not await self._is_ready():
                noticed = True
                row.noticed_s.append(time.monotonic() - began)
            await asyncio.sleep(POLL_S)
        await asyncio.to_thread(again.start)
        if await self._load.is_right():
            row.recovery_s.append(time.monotonic() - began)
        else:
            row.lost += 1

    async def wait_until_ready(self) -> None:
        """Wait until the gateway, too, says so."""
        deadline = time.monotonic() + START_S
        while not await self._is_ready():
            if time.monotonic() > deadline or not psutil.pid_exists(self._first):
                raise SystemExit("the gateway does not say that it is ready")
            await asyncio.sleep(POLL_S)

    def _pids(self, kind: str) -> list[int]:
        # The first is a guard, too: the one by which nothing outlives this program.
        below = (process for process in processes_below(self._first) if process.pid != self._first)
        return [process.pid for process in below if process.name == kind]

    async def _is_replaced(self, kind: str, old: int) -> bool:
        if old in (pids := self._pids(kind)) or not pids:
            return False
        # A worker is there before it listens.
        return kind != WORKER or await self._metric("pipeline_workers ") == self._workers

    async def _is_ready(self) -> bool:
        try:
            return (await self._client.get("/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    async def counts(self) -> Counter[str]:
        """Read what the gateway has counted since it began; zeros if it does not answer."""
        resumed, ended = (
            f'pipeline_migrations_total{{model="{self._name}",outcome="{outcome}"'
            for outcome in ("resumed", "ended")
        )
        beginnings = {"asked_again": "pipeline_retries_total{", "saved": resumed, "ended": ended}
        return Counter({name: int(await self._metric(beginning)) for name, beginning in beginnings.items()})

    async def _metric(self, beginning: str) -> float:
        """The sum of the metrics whose lines begin so; 0 if the gateway does not answer."""
        try:
            page = (await self._client.get("/metrics", timeout=10)).text
        except httpx.TransportError:
            return 0
        lines = [line for line in page.splitlines() if line.startswith(beginning)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Detached:
    """A deployment that `pipeline serve --detach` starts: no process of this program's is above it."""

    def __init__(self, words: Sequence[str], name: str, store: Store) -> None:
        self._words, self._name, self._store = words, name, store
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Number of the supervisor's process."""
        record = RunningServer.read(self._store.running, self._name)
        assert record is not None, "it was started"
        return record.pid

    def start(self) -> None:
        """Start it, on the same port each time, and wait until it is ready."""
        self._run("serve", *self._words, "--detach", "--port", str(self._port), *self._store.argv)

    def stop(self) -> None:
        """End it, if it runs."""
        record = RunningServer.read(self._store.running, self._name)
        if record is not None and psutil.pid_exists(record.pid):
            self._run("stop", self._name, *self._store.argv)

    def _run(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "pipeline.cli.main", *words], check=True, stdout=sys.stderr)


async def drill_supervisor(chosen: argparse.Namespace, supervisor: Detached, store: Store, name: str) -> Row:
    load, row = (
        KnownAnswerLoad(supervisor.url, name, streams=chosen.streams, hung_s=chosen.hung_s),
        Row(SUPERVISOR, "KILL"),
    )
    drilled = Drill(supervisor.pid, supervisor.url, store, name, load)
    await drilled.wait_until_ready()
    await load.learn()
    load.may_be_cut, load.answers = ("cut", "refused"), row.answers
    async with load.running():
        for _ in range(chosen.times):
            await asyncio.sleep(BETWEEN_S)
            await drilled.strike_supervisor(row, supervisor, chosen.recovery_s)
            await load.settle()
    _report(row, load)
    return row


def _report(row: Row, load: KnownAnswerLoad) -> None:
    summary = f"{row.kind} SIG{row.signal}: {row.times} times, {dict(row.answers)}, {row.lost} lost"
    print(summary, *load.wrong[:10], sep="\n", file=sys.stderr, flush=True)
    load.wrong.clear()


async def drill(
    chosen: argparse.Namespace, kinds: Sequence[str], served: ServedDeployment, store: Store, name: str
) -> list[Row]:
    url = served.record.gateway_url
    load = KnownAnswerLoad(url, name, streams=chosen.streams, hung_s=chosen.hung_s)
    drill = Drill(served.process.pid, url, store, name, load, workers=chosen.workers)
    await drill.wait_until_ready()
    await load.learn()
    rows = []
    async with load.running():
        for kind in kinds:
            for name_of_signal in chosen.signal or SIGNALS:
                row = Row(kind, name_of_signal)
                rows.append(row)
                load.may_be_cut = ("cut",) if kind in ("gateway", WORKER) else ()
                load.answers = row.answers
                before = await drill.counts()
                for _ in range(chosen.times):
                    await asyncio.sleep(BETWEEN_S)
                    await drill.strike(row, signal.Signals[f"SIG{name_of_signal}"], chosen.recovery_s)
                    # What was under way belongs to it.
                    await load.settle()
                if kind != "gateway":
                    counted = await drill.counts() - before
                    row.asked_again, row.saved, row.ended = (
                        counted[name] for name in ("asked_again", "saved", "ended")
                    )
                _report(row, load)
    return rows


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""

    def both(seconds: Sequence[float]) -> str:
        return f"{percentile(seconds, 50):.1f}, {max(seconds):.1f} s" if seconds else "-"

    counts = ("right", "error", "cut", "refused", "wrong", "hung")
    rows = [
        (
            f"{row['kind']}, SIG{row['signal']}",
            row["times"],
            both(row["noticed_s"]),
            both(row["recovery_s"]),
            f"{max(row['ready_lag_s']):.1f} s" if row["ready_lag_s"] else "-",
            *(row[name] for name in ("asked_again", "saved", "ended")),
            *(row["answers"].get(name, 0) for name in counts),
            row["lost"],
        )
        for row in result
    ]
    head = (
        "process, signal",
        "times",
        "noticed p50, max",
        "well again p50, max",
        "ready lag max",
        *("asked again", "saved", "ended"),
        *counts,
        "lost",
    )
    return markdown(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="tiny-cpu")
    parser.add_argument("--times", type=int, default=25, help="of each kind of process and signal")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument(
        "--kind", action="append", choices=(*KINDS, WORKER, SUPERVISOR), help="by default all"
    )
    parser.add_argument("--signal", action="append", choices=SIGNALS, help="by default both")
    parser.add_argument("--workers", type=int, default=1, help="of the gateway")
    parser.add_argument("--recovery-s", type=float, default=90.0)
    parser.add_argument("--hung-s", type=float, default=75.0)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, not as a table")
    chosen = parser.parse_args()
    store = Store.at(chosen.store)
    name = load_recipe(chosen.recipe).name
    # So that what was started is stopped then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if chosen.workers < 2 and WORKER in (chosen.kind or ()):
        parser.error("--kind worker: only a gateway of several has them, --workers 2")
    words = (
        *(chosen.recipe, "--build", "--set", "triton={max_restarts: 100000, restart_window_s: 1}"),
        *("--set", f"gateway.workers={chosen.workers}"),
    )
    logs = Path(tempfile.mkdtemp(prefix="pipeline-drill-"))
    print(f"output of pipeline serve: {logs}", file=sys.stderr)
    kinds = chosen.kind or (*KINDS, *([WORKER] if chosen.workers > 1 else []), SUPERVISOR)
    rows = []
    if below := [kind for kind in kinds if kind != SUPERVISOR]:
        with serving(words, name, store, logs) as served:
            rows = asyncio.run(drill(chosen, below, served, store, name))
    if SUPERVISOR in kinds and "KILL" in (chosen.signal or SIGNALS):
        detached = Detached(words, name, store)
        try:
            detached.start()
            rows.append(asyncio.run(drill_supervisor(chosen, detached, store, name)))
        finally:
            detached.stop()
    result = [asdict(row) | {"answers": dict(row.answers)} for row in rows]
    print(json.dumps(result, indent=2) if chosen.json else table(result))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
