"""Attack a deployment as one tenant, and judge by what another tenant notices.

    scripts/attack [NAME …] [--list] [--recipe tiny-cpu] [--json]

Serves the recipe with its gateway and two tenants, building it if need be. The victim streams short greedy answers all
the time; the attacker runs one attack after the other (`benchmarks/attacks/`). An attack fails if, from its first
request until `--after-s` after its last,

- an answer of the victim failed, was wrong, or stalled: its time to first token, or the gap between two chunks, was
  longer than `--allow-s` (3 s by default: an attacker may use its share of the processors, and no more);
- anything was restarted, or a process of the deployment was replaced;
- the memory of all processes together grew by more than `--allow-mib` at any time, or has not fallen to half of that;
- the deployment is not ready at the end, or the attacker has an answer of status 500 or above that is no refusal for
  want of room (429, 503).

Exit code 1 if any attack fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import json
import pkgutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks import attacks
from benchmarks.attacks import ATTACKS, Attack, Target
from benchmarks.common import markdown, serving
from pipeline.machine.processes import ProcessMemory, processes_below
from pipeline.recipe import load_recipe
from pipeline.serving.served import ServedDeployment
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.running import RunningServer

VICTIM, ATTACKER = "sk-victim", "sk-attacker"
STREAMS, TOKENS, QUESTIONS = 2, 48, 8
HUNG_S, READY_S, SAMPLE_S = 60.0, 120.0, 0.25


@dataclass(slots=True)
class Noticed:
    """Answers that the victim got while an attack ran. Times in seconds."""

    answers: int = 0
    faults: list[str] = field(default_factory=list)
    worst_first_s: float = 0.0
    worst_gap_s: float = 0.0


class Victim:
    """A tenant that streams greedy answers all the time, each known beforehand."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._expected: dict[int, str] = {}
        self._client = target.client(VICTIM, timeout_s=HUNG_S)
        self.noticed = Noticed()

    async def learn(self) -> None:
        """Ask every question once, while nothing is wrong."""
        for question in range(QUESTIONS):
            answer = await self._client.post("/v1/completions", json=self._body(question, stream=False))
            answer.raise_for_status()
            self._expected[question] = answer.json()["choices"][0]["text"]

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Ask in the background."""
        tasks = [asyncio.create_task(self._ask_for_ever(number)) for number in range(STREAMS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

    async def _ask_for_ever(self, stream: int) -> None:
        turn = stream
        while True:
            turn += STREAMS
            noticed, question = self.noticed, turn % QUESTIONS
            try:
                text = await self._ask(question, noticed)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                noticed.faults.append(f"{type(error).__name__} {error}"[:300])
                await asyncio.sleep(0.1)
                continue
            noticed.answers += 1
            if text != self._expected[question]:
                noticed.faults.append(f"{text!r} instead of {self._expected[question]!r}")

    async def _ask(self, question: int, noticed: Noticed) -> str:
        asked, last, parts = self._body(question, stream=True), time.monotonic(), list[str]()
        async with self._client.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return "".join(parts)
                if not data or data.startswith(":"):
                    continue
                event, now = json.loads(data), time.monotonic()
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                if parts:
                    noticed.worst_gap_s = max(noticed.worst_gap_s, now - last)
                else:
                    noticed.worst_first_s = max(noticed.worst_first_s, now - last)
                last = now
                parts.append(event["choices"][0]["text"])
        raise ValueError("the stream ended without [DONE]")

    def _body(self, question: int, *, stream: bool) -> dict[str, Any]:
        return {
            "model": self._target.model, "prompt": f"Question {question}: where is parcel number {question * 37}?",
            "temperature": 0, "max_tokens": TOKENS, "min_tokens": TOKENS, "stream": stream, "cache": False,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """One attack, and what came of it.

    Attributes:
        name: Name of the attack.
        seconds: Time from its first request to its last answer.
        sent: Status, or name of the error, of the attacker's requests -> their number.
        answers: Answers that the victim got.
        worst_first_s: Longest time to first token of the victim.
        worst_gap_s: Longest gap between two chunks of the victim.
        grown_mib: Growth of the memory of all processes, at its peak.
        kept_mib: The same at the end.
        broken: Bounds that do not hold; empty for an attack that was withstood.
    """

    name: str
    seconds: float
    sent: dict[str, int]
    answers: int
    worst_first_s: float
    worst_gap_s: float
    grown_mib: float
    kept_mib: float
    broken: list[str]


class Arena:
    """One deployment under attack, and its judges."""

    def __init__(
        self, served: ServedDeployment, store: Store, target: Target, chosen: argparse.Namespace
    ) -> None:
        self._served, self._store, self._target, self._chosen = served, store, target, chosen
        self._victim = Victim(target)
        models = Deployment.load(served.record.deployment.parent).models
        self._names = {"tritonserver", "gateway", "worker", "serve", *models}

    async def run(self, chosen: Sequence[Attack]) -> list[Outcome]:
        """Run attacks one after the other. One that breaks the deployment does not end the others, if that recovers."""
        await self._wait_until_ready()
        await self._victim.learn()
        outcomes = []
        async with self._victim.streaming():
            for attack in chosen:
                outcome = await self._judge(attack)
                outcomes.append(outcome)
                why = "; ".join(outcome.broken) or f"withstood, worst gap {outcome.worst_gap_s:.2f} s"
                print(f"{attack.name}: {why}", file=sys.stderr, flush=True)
                await self._wait_until_ready()
        return outcomes

    async def _judge(self, attack: Attack) -> Outcome:
        allow_s, allow_mib = self._chosen.allow_s, self._chosen.allow_mib
        before, restarts, peak_mib = self._processes(), self._restarts(), 0.0
        base_mib = self._memory_mib()
        noticed = self._victim.noticed = Noticed()
        self._target.sent.clear()
        began = time.monotonic()
        running = asyncio.create_task(attack.run(self._target))
        until = began + attack.limit_s
        while not running.done() and time.monotonic() < until:
            await asyncio.wait({running}, timeout=SAMPLE_S)
            peak_mib = max(peak_mib, self._memory_mib() - base_mib)
        late = not running.done()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        seconds = time.monotonic() - began
        await asyncio.sleep(self._chosen.after_s)
        peak_mib = max(peak_mib, kept_mib := self._memory_mib() - base_mib)
        broken = [f"the victim: {fault}" for fault in noticed.faults[:3]]
        if noticed.worst_first_s > allow_s or noticed.worst_gap_s > allow_s:
            worst_s = max(noticed.worst_first_s, noticed.worst_gap_s)
            broken.append(f"the victim waited {worst_s:.1f} s for a token")
        if not noticed.answers:
            broken.append("the victim got no answer")
        if (now := self._restarts()) != restarts:
            broken.append(f"restarts {restarts} -> {now}")
        if gone := sorted(name for pid, name in before.items() if pid not in self._processes()):
            broken.append(f"processes that ended: {', '.join(gone)}")
        if peak_mib > allow_mib or kept_mib > allow_mib / 2:
            broken.append(f"memory grew by {peak_mib:.0f} MiB, and {kept_mib:.0f} MiB of that stayed")
        if late:
            broken.append(f"the attacker's requests were not answered within {attack.limit_s:g} s")
        sent = self._target.sent
        if failed := {status for status in sent if status.startswith("5") and status != "503"}:
            broken.append(f"the attacker got status {', '.join(sorted(failed))}")
        if not await self._is_ready():
            broken.append("it is not ready at the end")
        return Outcome(
            attack.name, round(seconds, 1), dict(sorted(sent.items())), noticed.answers,
            round(noticed.worst_first_s, 3), round(noticed.worst_gap_s, 3), round(peak_mib, 1), round(kept_mib, 1),
            broken,
        )  # fmt: skip

    def _processes(self) -> dict[int, str]:
        """Processes that serve: number -> name. Helpers that come and go with requests are not among them."""
        below = processes_below(self._served.process.pid)
        return {process.pid: process.name for process in below if process.name in self._names}

    def _memory_mib(self) -> float:
        total = 0.0
        for process in processes_below(self._served.process.pid):
            with contextlib.suppress(OSError):
                total += ProcessMemory.of(process.pid).total
        return total

    def _restarts(self) -> dict[str, int]:
        return dict(self._record().restarts)

    def _record(self) -> RunningServer:
        record = RunningServer.read(self._store.running, self._target.model)
        if record is None:
            raise SystemExit(f"the deployment has ended; its output: {self._served.logs[0]}")
        return record

    async def _is_ready(self) -> bool:
        try:
            async with self._target.client(VICTIM, timeout_s=5.0) as client:
                return (await client.get("/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not await self._is_ready():
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"the deployment is not ready within {READY_S:g} s; its output: {self._served.logs[0]}"
                )
            await asyncio.sleep(SAMPLE_S)


def table(result: Any) -> str:
    """Render the outcomes as Markdown."""
    rows = [
        (
            row["name"],
            " ".join(f"{status}×{count}" for status, count in row["sent"].items()),
            f"{row['seconds']:.1f} s",
            row["answers"],
            f"{1000 * row['worst_first_s']:.0f} ms",
            f"{1000 * row['worst_gap_s']:.0f} ms",
            f"{row['grown_mib']:.0f} MiB",
            "withstood" if not row["broken"] else "; ".join(row["broken"]),
        )
        for row in result
    ]
    head = (
        "attack", "attacker's answers", "took", "victim's answers", "worst TTFT", "worst gap", "memory peak", "verdict",
    )  # fmt: skip
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    for module in pkgutil.iter_modules(attacks.__path__):
        importlib.import_module(f"benchmarks.attacks.{module.name}")
    parser = argparse.ArgumentParser(
        prog="scripts/attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="an attack, or the beginning of names; by default all"
    )
    parser.add_argument("--list", action="store_true", help="print the attacks")
    parser.add_argument("--recipe", default="tiny-cpu")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--allow-s", type=float, default=3.0, help="longest wait of the victim for a token")
    parser.add_argument("--allow-mib", type=float, default=512.0, help="growth of memory")
    parser.add_argument("--after-s", type=float, default=2.0, help="time to watch after an attack")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON, not as a table")
    chosen = parser.parse_args(arguments)
    wanted = [attack for attack in ATTACKS if not chosen.names or attack.name.startswith(tuple(chosen.names))]
    if not wanted:
        parser.error(
            f"no attack begins with {', '.join(chosen.names)}; there are {', '.join(attack.name for attack in ATTACKS)}"
        )
    if chosen.list:
        for attack_name in wanted:
            print(f"{attack_name.name:<28}{attack_name.what}")
        return 0
    store, recipe = Store.at(chosen.store), load_recipe(chosen.recipe)
    folder = Path(tempfile.mkdtemp(prefix="pipeline-attack-"))
    keys = folder / "keys.yaml"
    keys.write_text(f"tenants:\n  victim: {{keys: [{VICTIM}]}}\n  attacker: {{keys: [{ATTACKER}]}}\n")
    keys.chmod(0o600)
    print(f"output of pipeline serve: {folder}", file=sys.stderr)
    words = (chosen.recipe, "--build", "--set", "serving.http=true", "--keys", str(keys))
    with serving(words, recipe.name, store, folder / "logs") as served:
        target = Target(served.record, recipe.name, ATTACKER, Counter())
        outcomes = asyncio.run(Arena(served, store, target, chosen).run(wanted))
    result = [dataclasses.asdict(outcome) for outcome in outcomes]
    print(json.dumps(result, indent=1) if chosen.json else table(result))
    return int(any(outcome.broken for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
