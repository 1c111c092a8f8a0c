"""An hour of mixed load on one deployment, as a user starts it: does it hold, stay fast, and keep its memory flat?

    python benchmarks/soak.py [tiny-cpu] [--minutes 60] [--streams 12] [--exchange] [--json]

Builds the recipe if need be, starts `pipeline serve` with a response cache and three tenants, and asks its gateway what
`benchmarks/mixed_load.py` has: a fifth are questions that the cache answers; some clients leave in the middle of an
answer, some read slowly. With `--exchange`, `pipeline rollout` replaces the package on the way.

The exit code is 1 if one of these does not hold:

- no request fails, none is answered otherwise than the same greedy question before, every complete answer has the form
  that was asked for, and nothing had to be restarted;
- memory of each process (Triton, the stub of each model, gateway, supervisor): through its second half a line is fitted
  by least squares, and it rises by at most `--allow-mib` per 10,000 requests. A process that an exchange ended or began
  is judged by its own time;
- time to the first token of streamed answers that are not from the cache: p99 of the last sixth is at most
  `--allow-ttft` times that of the first sixth. The first minute (`--warm-up-s`) counts for nothing.

Memory: anonymous, and a share of what several processes map, in MiB. Linux only. The load takes processor time of the
same machine, so compare runs only with each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx

from benchmarks.common import markdown
from benchmarks.mixed_load import TENANTS, Mix, Request, reason_of, text_of
from pipeline import progress
from pipeline.bench.statistics import percentile
from pipeline.machine.processes import ProcessMemory, processes_below
from pipeline.prepare import prepare
from pipeline.recipe import load_recipe
from pipeline.serving.live import MetricsPage
from pipeline.serving.served import ServedDeployment
from pipeline.stages import Builder
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import RunningServer

WINDOWS, EVERY_S = 6, 5.0
# Workers that read or compile one request come and go, and are not shown.
LEAST_SAMPLES = 12
# Share of the time after which the package is exchanged: the second half is then of the new one alone.
EXCHANGE_AT = 0.4
# A package that answers the same as the recipe's own.
OTHER = "limits.max_batch_tokens=600"
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Process:
    """Memory of one process over time: seconds, requests so far, MiB."""

    name: str
    pid: int
    samples: list[tuple[float, int, float]] = field(default_factory=list)

    @property
    def lived_s(self) -> float:
        return self.samples[-1][0] - self.samples[0][0]

    def slope(self, by: int) -> float:
        """MiB for each unit of a column of the samples, in their second half; 0 of one that lived too short."""
        second = self.samples[len(self.samples) // 2 :]
        if len({sample[by] for sample in second}) < 2:
            return 0.0
        return linear_regression([sample[by] for sample in second], [sample[2] for sample in second]).slope

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pid": self.pid,
            "seconds": round(self.lived_s),
            "first_mib": round(self.samples[0][2], 1),
            "last_mib": round(self.samples[-1][2], 1),
            "mib_per_hour": round(3600 * self.slope(0), 2),
            "mib_per_10000_requests": round(10_000 * self.slope(1), 2),
        }


@dataclass(slots=True)
class Soak:
    """The run: what is asked, and what was seen."""

    base_url: str
    mix: Mix
    pid: int
    warm_up_s: float
    seconds: float
    requests: int = 0
    left: int = 0
    faults: list[str] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    first_ms: list[tuple[float, float]] = field(default_factory=list)  # when it was asked, TTFT
    known: dict[str, str] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def at_s(self) -> float:
        """Seconds since the warm-up."""
        return time.monotonic() - self.began - self.warm_up_s

    async def run(self, streams: int, pause_s: float, exchange: Any) -> None:
        """Keep the load up to the end; `exchange` is awaited in the middle, beside it."""
        async with (
            httpx.AsyncClient(base_url=self.base_url, timeout=TIMEOUT_S, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            watching = group.create_task(self._watch())
            middle = group.create_task(self._exchange(exchange))
            async with asyncio.TaskGroup() as load:
                for number in range(streams):
                    load.create_task(self._keep_asking(client, random.Random(number), pause_s))
            await middle
            watching.cancel()

    async def _exchange(self, exchange: Any) -> None:
        await asyncio.sleep(max(0.0, self.warm_up_s + EXCHANGE_AT * self.seconds))
        await exchange()

    async def _keep_asking(self, client: httpx.AsyncClient, chance: random.Random, pause_s: float) -> None:
        while self.at_s < self.seconds:
            request, asked_s = self.mix.next(), self.at_s
            try:
                await self._ask(client, request)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                told = json.dumps(request.body)
                self.faults.append(
                    f"{asked_s:.0f} s, {request.path}: {type(error).__name__} {error}: {told[:300]}"
                )
            self.requests += 1
            await asyncio.sleep(chance.expovariate(1 / pause_s) if pause_s else 0)

    async def _ask(self, client: httpx.AsyncClient, request: Request) -> None:
        began, asked_s, first, over = time.perf_counter(), self.at_s, 0.0, False
        parts, reason = list[str](), ""
        headers = {"Authorization": f"Bearer sk-{request.tenant}"}
        async with client.stream("POST", request.path, json=request.body, headers=headers) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {(await answer.aread()).decode()[:300]}")
            source = answer.headers.get("x-cache", "")
            self.cached[source] += 1
            if not request.body["stream"]:
                whole = json.loads(await answer.aread())
                parts, reason, over = [text_of(whole)], reason_of(whole), True
            else:
                async with aclosing(answer.aiter_lines()) as lines:
                    async for line in lines:
                        if line == "data: [DONE]":
                            over = True
                        elif line.startswith("data: "):
                            event = json.loads(line[6:])
                            reason = reason_of(event) or reason
                            if not (text := text_of(event)):
                                continue
                            parts.append(text)
                            first = first or time.perf_counter()
                            if request.leaves and len(parts) > 2:
                                self.left += 1
                                return
                            if request.reads_slowly and len(parts) % 8 == 0:
                                await asyncio.sleep(0.5)
        if not over:
            raise ValueError(f"the stream ended without [DONE], after {len(parts)} parts")
        if first and source == "miss":
            self.first_ms.append((asked_s, 1e3 * (first - began)))
        text = "".join(parts)
        if request.form is not None and reason == "stop" and not re.fullmatch(request.form, text, re.DOTALL):
            raise ValueError(f"{text!r} has not the form {request.form}")
        if request.repeats is not None and text != (before := self.known.setdefault(request.repeats, text)):
            raise ValueError(f"{text!r} instead of {before!r}, as before (x-cache: {source})")

    async def _watch(self) -> None:
        """Take samples of memory, and say how it goes."""
        told = -60.0
        while True:
            total = 0.0
            for process in processes_below(self.pid):
                if process.name == "guard":
                    continue
                try:
                    held = ProcessMemory.of(process.pid).total
                except OSError:
                    # It has just ended.
                    continue
                total += held
                seen = self.processes.setdefault(process.pid, Process(process.name, process.pid))
                seen.samples.append((self.at_s, self.requests, held))
            if self.at_s - told >= min(30.0, self.seconds / 20):
                told = self.at_s
                recent = [ms for at, ms in self.first_ms[-500:] if at > self.at_s - 60]
                p99 = f"{percentile(recent, 99):.0f} ms" if recent else "-"
                hits = self.cached["exact"]
                note(
                    f"{self.at_s:7.0f} s  {self.requests:7} requests  {len(self.faults)} faults  {hits:6} cache hits  "
                    f"{self.left:5} left  p99 TTFT of the last minute {p99:>8}  {total:7.1f} MiB"
                )
            await asyncio.sleep(min(EVERY_S, self.seconds / 60))

    def windows(self) -> list[dict[str, Any]]:
        """Compute TTFT of each sixth of the time."""
        length, found = self.seconds / WINDOWS, []
        for number in range(WINDOWS):
            inside = [ms for at, ms in self.first_ms if number * length <= at < (number + 1) * length]
            figures = {f"p{p}_ms": round(percentile(inside, p), 1) for p in (50, 95, 99)} if inside else {}
            found.append({"minutes": round((number + 1) * length / 60, 1), "streams": len(inside), **figures})
        return found


def broken(soak: Soak, restarts: dict[str, int], allow_mib: float, allow_ttft: float) -> Iterator[str]:
    """Yield the bounds that do not hold."""
    if soak.faults:
        yield f"{len(soak.faults)} of {soak.requests} requests failed or were answered wrongly"
    if any(restarts.values()):
        yield f"restarted: {restarts}"
    for process in soak.processes.values():
        grown = 10_000 * process.slope(1)
        if grown > allow_mib and process.lived_s > soak.seconds / 4:
            yield f"{process.name} grows by {grown:.2f} MiB per 10,000 requests; {allow_mib:g} are allowed"
    first, *_, last = soak.windows()
    if "p99_ms" not in first or "p99_ms" not in last:
        yield "there are too few streams to compare time to first token"
    elif last["p99_ms"] > allow_ttft * first["p99_ms"]:
        ratio = last["p99_ms"] / first["p99_ms"]
        yield f"p99 TTFT of the last sixth is {ratio:.2f} times that of the first; {allow_ttft:g} is allowed"


async def exchange(words: tuple[str, ...], soak: Soak, done: list[dict[str, Any]]) -> None:
    """`pipeline rollout` of a package that answers the same."""
    note("exchange: pipeline rollout")
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pipeline.cli.main",
        "rollout",
        *words,
        "--set",
        OTHER,
        "--build",
        "--json",
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    seconds = round(time.monotonic() - began, 1)
    done.append({"exit_code": process.returncode, "seconds": seconds})
    note(f"exchange: exit code {process.returncode} after {seconds} s")
    if process.returncode:
        soak.faults.append(f"pipeline rollout: {output.decode()[-1000:]}")


def last_words(logs: Path) -> Iterator[str]:
    """Yield the last output of each Triton that a signal of its own ended: a line each, with its stack."""
    for file in sorted(logs.glob("triton*.log*")):
        lines = file.read_text(errors="replace").splitlines()
        for start, line in enumerate(lines):
            if re.match(r"Signal \((?!2\)|15\))", line):
                yield "; ".join(" ".join(line.split()) for line in lines[start : start + 8])[:1000]
                break


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    memory = [
        (
            row["name"],
            f"{row['seconds']:,} s",
            f"{row['first_mib']:.1f} to {row['last_mib']:.1f} MiB",
            f"{row['mib_per_10000_requests']:+.2f} MiB",
        )
        for row in result["processes"]
    ]
    first = [
        (f"to minute {row['minutes']:g}", row["streams"], *(row.get(f"p{p}_ms", "") for p in (50, 95, 99)))
        for row in result["windows"]
    ]
    told = (
        f"{result['requests']:,} requests in {result['minutes']:g} minutes, {result['left']:,} left by their clients, "
        f"{len(result['faults'])} faults; bounds that did not hold: {'; '.join(result['broken']) or 'none'}."
    )
    faults = [f"- {fault}" for fault in result["faults"][:10]]
    faults += [f"- Triton: {said}" for said in result.get("last_words", ())]
    parts = (
        told,
        *(["\n".join(faults)] if faults else []),
        markdown(("process", "lived", "memory", "growth for each 10,000 requests"), memory),
        markdown(("", "streams", "TTFT p50, ms", "p95", "p99"), first),
    )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="tiny-cpu")
    parser.add_argument("--minutes", type=float, default=60.0, help="after the warm-up")
    parser.add_argument("--warm-up-s", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=12, help="clients at a time")
    parser.add_argument(
        "--pause-s", type=float, default=0.25, help="of a client between two requests, on average"
    )
    parser.add_argument("--exchange", action="store_true", help="pipeline rollout on the way")
    parser.add_argument(
        "--allow-mib", type=float, default=2.0, help="growth of a process per 10,000 requests"
    )
    parser.add_argument(
        "--allow-ttft", type=float, default=1.2, help="p99 of the last sixth over that of the first"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    chosen = parser.parse_args()
    store = Store.at(None)
    report = progress.for_stream()
    with tempfile.TemporaryDirectory(prefix="pipeline-soak-") as folder:
        # A cache of this run's own: what an earlier one has kept would be hit at once.
        cache = f"cache={{enabled: true, backend: {{kind: sqlite, path: {folder}/cache.sqlite}}}}"
        recipe = load_recipe(chosen.recipe, (cache,))
        package = Builder(prepare(recipe, store, progress=report), store, report).run().path
        deployment, words = Deployment.load(package), (*recipe.argv, *store.argv)
        keys = Path(folder) / "keys.yaml"
        tenants = "".join(f"  {name}: {{keys: [sk-{name}]}}\n" for name in TENANTS)
        keys.write_text(f"tenants:\n{tenants}")
        keys.chmod(0o600)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        served = ServedDeployment.start(
            (*words, "--keys", str(keys)), deployment.name, store.running, Path(folder) / "logs",
            deadline_s=deployment.start_deadline_s,
        )  # fmt: skip
        try:
            result = measure(chosen, served, deployment, words, store)
        finally:
            served.stop()
        result["last_words"] = list(last_words(Path(folder) / "logs"))
    print(json.dumps(result, indent=1) if chosen.json else table(result))
    sys.exit(int(bool(result["broken"])))


def measure(
    chosen: argparse.Namespace,
    served: ServedDeployment,
    deployment: Deployment,
    words: tuple[str, ...],
    store: Store,
) -> dict[str, Any]:
    """Run the load, and put together what was seen."""
    mix = Mix(deployment.name, deployment.limits, guided=deployment.guided_decoding)
    soak = Soak(served.record.gateway_url, mix, served.process.pid, chosen.warm_up_s, chosen.minutes * 60)
    exchanges: list[dict[str, Any]] = []

    async def exchange_once() -> None:
        if chosen.exchange:
            await exchange(words, soak, exchanges)

    asyncio.run(soak.run(chosen.streams, chosen.pause_s, exchange_once))
    record = RunningServer.read(store.running, deployment.name)
    restarts = dict(record.restarts) if record is not None else {}
    page = MetricsPage.fetch(f"{served.record.gateway_url}/metrics")
    return {
        "recipe": deployment.name,
        "minutes": chosen.minutes,
        "requests": soak.requests,
        "left": soak.left,
        "faults": soak.faults,
        "x_cache": dict(soak.cached),
        "cache_events": page.by("pipeline_cache_events_total", "event") if page is not None else {},
        "restarts": restarts,
        "exchanges": exchanges,
        "windows": soak.windows(),
        "processes": [p.as_json() for p in soak.processes.values() if len(p.samples) >= LEAST_SAMPLES],
        "broken": list(broken(soak, restarts, chosen.allow_mib, chosen.allow_ttft)),
    }


if __name__ == "__main__":
    main()
