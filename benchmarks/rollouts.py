"""Exchanges of a package under load: how many requests fail, which are answered wrongly, and what they feel of it.

    python benchmarks/rollouts.py [--streams 16] [--exchanges 10] [--in-place] [--workers N] [--json]

Builds two packages of one name that answer every question differently (the two checkpoints of the repository), serves
the first by `pipeline serve`, and asks through its gateway, greedily, one question after the other on each stream.
Meanwhile `pipeline rollback` exchanges the packages again and again.

    failed   a request that had no 200, or a stream that broke off
    wrong    an answer that is neither package's: a mix, or a part of one
    stale    an answer of the package that had been replaced before the question was asked

Exit code 1 says that one of them is not 0. Time to first token is that of requests which were under way during an
exchange, beside those which were not. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, markdown, serving
from pipeline.bench.statistics import percentile
from pipeline.bench.targets import BenchRequest, OpenAITarget
from pipeline.client import Message
from pipeline.store import Store

NAME = "rollouts"
RECIPE = """\
name: rollouts
model: {{source: "local:{checkpoint}"}}
runtime: {{kind: cpu, threads: 1}}
limits: {{max_input_tokens: 128, max_output_tokens: 48, max_concurrency: 16}}
golden: {{file: golden.jsonl}}
"""
GOLDEN = '{"messages": [{"role": "user", "content": "Where is my parcel?"}]}\n'
# Of what the checkpoints never learned, so that the small one answers otherwise than the large one.
QUESTIONS = (
    "Hello", "Why?", "1 2 3 4", "What is the capital of France?", "Tell me a story about a fox.",
    "How do I cancel my contract?", "My name is Ada and I want a refund for my keyboard, please.",
    "Where is my parcel? And can I keep my number?",
)  # fmt: skip
BASELINE_S, PAUSE_S = 10.0, 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when, and what came of it."""

    question: int
    began: float
    ended: float
    ttft_ms: float | None
    text: str
    fault: str  # empty if it was answered


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange, from the command's start to its end."""

    began: float
    ended: float
    package: str
    seconds: float  # as the supervisor says


def pipeline(*words: str) -> dict[str, Any]:
    """Run a command of ours, and read the JSON that it prints."""
    command = [sys.executable, "-m", "pipeline.cli.main", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


async def ask(target: OpenAITarget, question: int) -> Asked:
    """Ask one question, and read the stream to its end."""
    began = time.monotonic()
    messages: list[Message] = [{"role": "user", "content": QUESTIONS[question]}]
    reply = await target.ask(BenchRequest(messages, {"temperature": 0}))
    return Asked(question, began, time.monotonic(), reply.stats.ttft_ms, reply.text, reply.error)


async def answers(url: str) -> list[str]:
    """The answer to each question now, with nothing else under way."""
    async with OpenAITarget(url, NAME, timeout_s=60) as target:
        asked = [await ask(target, question) for question in range(len(QUESTIONS))]
    for answer in asked:
        if answer.fault:
            raise SystemExit(f"{QUESTIONS[answer.question]}: {answer.fault}")
    return [answer.text for answer in asked]


async def load(url: str, streams: int, stop: asyncio.Event) -> list[Asked]:
    """Ask on so many streams until told to stop."""
    asked: list[Asked] = []

    async def ask_at(target: OpenAITarget, at: int) -> None:
        while not stop.is_set():
            asked.append(await ask(target, at % len(QUESTIONS)))
            at += 1

    async with OpenAITarget(url, NAME, timeout_s=120) as target, asyncio.TaskGroup() as group:
        for at in range(streams):
            group.create_task(ask_at(target, at))
    return asked


async def exchanges(count: int, store: Path, more: Sequence[str]) -> list[Exchange]:
    """Exchange the package so many times, one after the other."""
    made = []
    for number in range(count):
        began = time.monotonic()
        result = await asyncio.to_thread(pipeline, "rollback", NAME, "--store", str(store), *more)
        made.append(Exchange(began, time.monotonic(), result["package"], result["seconds"]))
        print(
            f"  {number + 1}: {result['seconds']:.1f} s, to {Path(result['package']).name}", file=sys.stderr
        )
        await asyncio.sleep(PAUSE_S)
    return made


async def run(
    url: str, streams: int, count: int, store: Path, more: Sequence[str]
) -> tuple[list[Asked], list[Exchange]]:
    """Load and exchanges together, with some seconds of load alone before."""
    stop = asyncio.Event()
    loading = asyncio.create_task(load(url, streams, stop))
    await asyncio.sleep(BASELINE_S)
    made = await exchanges(count, store, more)
    stop.set()
    return await loading, made


def judge(
    asked: Sequence[Asked], made: Sequence[Exchange], expected: dict[str, list[str]], first: str
) -> dict[str, Any]:
    """Count what went wrong, and summarize times."""
    failed = [answer for answer in asked if answer.fault]
    answered = [answer for answer in asked if not answer.fault]
    # From when on each package was served alone.
    alone = [(float("-inf"), first), *((exchange.ended, exchange.package) for exchange in made)]
    wrong, stale, during, outside = list[Asked](), list[Asked](), list[Asked](), list[Asked]()
    for answer in answered:
        overlaps = any(exchange.began <= answer.ended and answer.began <= exchange.ended for exchange in made)
        (during if overlaps else outside).append(answer)
        if all(answer.text != texts[answer.question] for texts in expected.values()):
            wrong.append(answer)
        elif not overlaps:
            package = [package for since, package in alone if since <= answer.began][-1]
            if answer.text != expected[package][answer.question]:
                stale.append(answer)

    def ttft_ms(some: Sequence[Asked], percent: float) -> float | None:
        values = [some_answer.ttft_ms for some_answer in some if some_answer.ttft_ms is not None]
        return round(percentile(values, percent), 1) if values else None

    by_package = {
        Path(package).name: sum(answer.text == texts[answer.question] for answer in answered)
        for package, texts in expected.items()
    }
    return {
        "requests": len(asked),
        "during_exchanges": len(during),
        "answered_by": by_package,
        "failed": len(failed),
        "wrong": len(wrong),
        "stale": len(stale),
        "exchanges": len(made),
        "exchange_s": {
            "p50": round(percentile([exchange.seconds for exchange in made], 50), 1),
            "max": max(exchange.seconds for exchange in made),
        },
        "ttft_ms": {
            "during": {"p50": ttft_ms(during, 50), "p99": ttft_ms(during, 99)},
            "outside": {"p50": ttft_ms(outside, 50), "p99": ttft_ms(outside, 99)},
        },
        "faults": sorted({answer.fault for answer in failed})[:5],
        "wrong_answers": sorted({answer.text for answer in wrong})[:5],
    }


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    times, ttft = result["exchange_s"], result["ttft_ms"]
    wrong = ("failed", "wrong", "stale")
    rows = [
        (
            "requests, of which under way during an exchange",
            f"{result['requests']:,}, {result['during_exchanges']:,}",
        ),
        (
            "failed; answered by neither package; by the one that had been replaced",
            "; ".join(str(result[name]) for name in wrong),
        ),
        (
            f"{result['exchanges']} exchanges, from the command to the end of the old Triton (p50, max)",
            f"{times['p50']}, {times['max']} s",
        ),
        *(
            (
                f"TTFT p50 and p99 {when}",
                " and ".join(f"{ttft[key][name]} ms" for name in ("p50", "p99")),
            )
            for key, when in (("during", "during exchanges"), ("outside", "else"))
        ),
    ]
    rows += [("such as", repr(text)) for text in (*result["faults"], *result["wrong_answers"])]
    return markdown((f"{result['streams']} streams", ""), rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--exchanges", type=int, default=10)
    parser.add_argument(
        "--in-place", action="store_true", help="end the old Triton before the new one starts"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes of the gateway")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--store", type=Path, help="by default a temporary folder")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollouts-")))
        store = (options.store or folder / "store").absolute()
        store.mkdir(parents=True, exist_ok=True)
        recipes, packages = [], []
        for checkpoint in ("support-target", "support-draft"):
            recipe = folder / f"{checkpoint}.yaml"
            recipe.write_text(RECIPE.format(checkpoint=ROOT / "recipes" / "checkpoints" / checkpoint))
            (folder / "golden.jsonl").write_text(GOLDEN)
            packages.append(pipeline("build", str(recipe), "--store", str(store))["artifact"])
            recipes.append(recipe)
        words = (str(recipes[0]), "--set", f"gateway.workers={options.workers}")
        served = stack.enter_context(serving(words, NAME, Store.at(store), store / "logs"))
        url = served.record.gateway_url
        expected = {packages[0]: asyncio.run(answers(url))}
        pipeline("rollout", str(recipes[1]), "--store", str(store))
        expected[packages[1]] = asyncio.run(answers(url))
        for question, first, second in zip(QUESTIONS, *expected.values(), strict=True):
            if first == second:
                raise SystemExit(f"both packages answer {question!r} alike: {first!r}")
        more = ["--in-place"] if options.in_place else []
        asked, made = asyncio.run(run(url, options.streams, options.exchanges, store, more))
    found = {"streams": options.streams, **judge(asked, made, expected, packages[1])}
    print(json.dumps(found, indent=2, ensure_ascii=False) if options.json else table(found))
    return 1 if found["failed"] or found["wrong"] or found["stale"] else 0


if __name__ == "__main__":
    sys.exit(main())
