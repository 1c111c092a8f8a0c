"""`pipeline bench` beside AIPerf on the same server: do both report the same?

    python benchmarks/agreement.py [--rounds 5] [--concurrency 4] [--requests 200] [--json]
    python benchmarks/agreement.py --gateway                    our gateway in front of scripted answers instead
    python benchmarks/agreement.py --recipe tiny-cpu            our gateway and a real engine instead
    python benchmarks/agreement.py --url URL --model NAME --tokenizer FOLDER          any server that runs already

AIPerf is installed into an environment of its own. Both put the same load on one server, in turns, round by round: as
many requests, as many at a time, streamed chats of the same prompts, answers of exactly as many tokens. Compared is
what each reports. Without a server's name that is `benchmarks/stand_in.py`, which has no model and writes down by its
own clock when every chunk went out: a third column that neither of the two has made.

What AIPerf calls inter token latency is TPOT here, and its inter chunk latency ITL. Both divide the tokens by the time
to the end of the last answer; AIPerf's time begins with an idle server, ours under load, at the end of the warm-up.
From one answer to the next question AIPerf's processes talk to each other, so it keeps fewer requests under way than it
was asked for ("requests under way", by Little's law), the more so the busier the machine is. And an engine that shares
its processors with the tool that measures it is slowed down by that tool: with `--recipe` they need some of their own.

Exit code 1 if a median or a throughput differs by more than `--within` (the median of all rounds). Percentiles above
the median are shown: whether AIPerf's is within the 95 % interval that ours comes with, in how many of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import (
    HERE,
    ROOT,
    in_turns,
    markdown,
    or_empty,
    peer_environment,
    running,
    serving,
)
from pipeline import progress
from pipeline.bench.lengths import Lengths
from pipeline.bench.load_settings import LoadSettings
from pipeline.bench.result import LevelResult
from pipeline.bench.run import run_bench
from pipeline.bench.statistics import percentile
from pipeline.bench.subject import Subject
from pipeline.bench.workload import Words
from pipeline.prepare import prepare
from pipeline.progress import Silent
from pipeline.reading import read_tokenizer
from pipeline.recipe import load_recipe
from pipeline.stages import Builder
from pipeline.store import Store

# Ours, AIPerf's tag, what people read.
LATENCIES = (
    ("ttft", "time_to_first_token", "TTFT"),
    ("tpot", "inter_token_latency", "TPOT"),
    ("itl", "inter_chunk_latency", "ITL"),
    ("total", "request_latency", "request"),
)
PERCENTILES = (50, 95, 99)
# A model server whose answers take times that depend on the prompt alone.
SCRIPTED = """
import random, sys
from pipeline.client.testing import FakeServer, Reply
first_s, gap_s, tokens = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 1e3, int(sys.argv[3])
def reply(received):
    chance = random.Random(received.prompt)
    first, gap = first_s * chance.lognormvariate(0, 0.25), gap_s * chance.uniform(0.7, 1.3)
    return Reply([f"token{n} " for n in range(tokens)], first_delay_s=first, delay_s=gap)
with FakeServer(reply) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
WARM_UP_S = 2.0
TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Server:
    """Whom both ask.

    Attributes:
        url: Without /v1.
        model: Name that requests give.
        tokenizer: Folder with its tokenizer.json.
        told_url: Where the stand-in says what it did; empty for other servers.
        scripted: Whether its times depend on the prompt alone, and it keeps nothing.
    """

    url: str
    model: str
    tokenizer: Path
    told_url: str = ""
    scripted: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run by one tool, or by the stand-in: percentiles by (latency, percent), in ms, and rates."""

    latencies: dict[tuple[str, int], float]
    tokens_per_s: float | None = None
    request_mean_ms: float = 0.0
    intervals: dict[tuple[str, int], tuple[float, float] | None] | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one tool, and what the stand-in did meanwhile."""

    reported: Figures
    server: Figures | None


class Comparison:
    """Runs each tool once, whenever it is its turn."""

    def __init__(self, server: Server, chosen: argparse.Namespace, folder: Path, aiperf: Path) -> None:
        self._server, self._chosen, self._folder, self._aiperf = server, chosen, folder, aiperf
        self._words = Words(read_tokenizer(server.tokenizer / "tokenizer.json"))
        self._number = 0

    def run(self, tool: str) -> Run:
        """One run. Prompts are others each time, so that an engine reuses nothing; a script needs the same ones."""
        self._number += 1
        seed = 0 if self._server.scripted else self._number
        chance, count = random.Random(seed), self._chosen.requests + 4 * self._chosen.concurrency
        prompts = [self._words.text(self._chosen.input_tokens, chance) for _ in range(count)]
        self._told()
        reported = self._ours(prompts) if tool == "pipeline bench" else self._theirs(prompts)
        return Run(reported, self._told())

    def _ours(self, prompts: list[str]) -> Figures:
        file = self._folder / "ours.jsonl"
        file.write_text(
            "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in prompts)
        )
        subject = Subject(
            name=self._server.url, way="gateway", url=self._server.url, model=self._server.model,
            tokenizer=None, max_prompt=1 << 20, max_answer=1 << 20,
        )  # fmt: skip
        settings = LoadSettings(
            concurrency=(self._chosen.concurrency,),
            prompts=file,
            output_tokens=Lengths(self._chosen.output_tokens),
            requests=self._chosen.requests,
            warmup_s=WARM_UP_S,
        )
        (level,) = run_bench(subject, settings, Silent()).levels
        return of_level(level)

    def _theirs(self, prompts: list[str]) -> Figures:
        file, out = self._folder / "theirs.jsonl", self._folder / f"aiperf-{self._number}"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in prompts))
        tokens = self._chosen.output_tokens
        command = [
            *(self._aiperf, "profile", "--model", self._server.model, "--url", self._server.url),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
            *("--concurrency", self._chosen.concurrency, "--request-count", self._chosen.requests),
            *("--warmup-request-count", 2 * self._chosen.concurrency),
            *("--input-file", file, "--custom-dataset-type", "single_turn"),
            *("--dataset-sampling-strategy", "sequential"),
            *("--extra-inputs", f"max_tokens:{tokens}", "--extra-inputs", f"min_tokens:{tokens}"),
            *("--extra-inputs", "temperature:0", "--tokenizer", self._server.tokenizer),
            *("--output-artifact-dir", out, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"),
            *("--workers-max", 1, "--record-processor-service-count", 1),
        ]
        # Offline, it would not look into a folder for its tokenizer.
        offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTHONPATH")
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
            env={name: value for name, value in os.environ.items() if name not in offline},
        )  # fmt: skip
        exported = out / "profile_export_aiperf.json"
        if done.returncode or not exported.is_file():
            raise SystemExit(f"AIPerf: exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
        report = json.loads(exported.read_text())
        if report.get("error_request_count", {}).get("avg"):
            raise SystemExit(f"AIPerf: requests failed: {report['error_request_count']}")
        latencies = {
            (name, percent): report[tag][f"p{percent}"]
            for name, tag, _ in LATENCIES
            for percent in PERCENTILES
        }
        return Figures(latencies, report["output_token_throughput"]["avg"], report["request_latency"]["avg"])

    def _told(self) -> Figures | None:
        """Figures of the stand-in since the last call; the warm-up of either tool is a small part of them."""
        if not self._server.told_url:
            return None
        with urllib.request.urlopen(self._server.told_url, timeout=60) as answer:
            # The request before a load has one token.
            seen = [answer for answer in json.load(answer) if answer["itl"]]
        if not seen:
            return None
        values = {
            "ttft": [answer["ttft"] for answer in seen],
            "total": [answer["total"] for answer in seen],
            "tpot": [statistics.fmean(answer["itl"]) for answer in seen],
            "itl": [gap for answer in seen for gap in answer["itl"]],
        }
        return Figures(
            {
                (name, percent): percentile(values[name], percent)
                for name, _, _ in LATENCIES
                for percent in PERCENTILES
            }
        )


def of_level(level: LevelResult) -> Figures:
    """Ours, of one load; ends the program where requests failed."""
    if level.failed_share:
        raise SystemExit(f"pipeline bench: requests failed: {level.requests} {level.errors}")
    keys = [(name, percent) for name, _, _ in LATENCIES for percent in PERCENTILES]
    return Figures(
        {(name, percent): level.latencies[name].at(percent) for name, percent in keys},
        level.output_tokens_per_s,
        level.latencies["total"].mean,
        {(name, percent): level.latencies[name].intervals[f"p{percent}"] for name, percent in keys},
    )


def compare(samples: dict[str, list[Run]], within: float, output_tokens: int) -> list[dict[str, Any]]:
    """One row for each figure: medians of the rounds, their difference, and whether it holds."""
    ours, theirs = samples["pipeline bench"], samples["AIPerf"]
    rows = []
    for name, _, label in LATENCIES:
        for percent in PERCENTILES:
            key = (name, percent)
            mine = [run.reported.latencies[key] for run in ours]
            other = [run.reported.latencies[key] for run in theirs]
            row = _row(f"{label} p{percent}, ms", mine, other, within if percent == 50 else None)
            if all(run.server is not None for run in (*ours, *theirs)):
                told = [run.server.latencies[key] for run in ours if run.server is not None]
                row["server"] = round(statistics.median(told), 3)
                row["ours_beside_server"] = _difference(mine, told)
                told = [run.server.latencies[key] for run in theirs if run.server is not None]
                row["aiperf_beside_server"] = _difference(other, told)
            spans = [(run.reported.intervals or {}).get(key) for run in ours]
            known = [(span, value) for span, value in zip(spans, other, strict=True) if span is not None]
            row["within_interval"] = [sum(low <= value <= high for (low, high), value in known), len(known)]
            rows.append(row)
    mine, other = ([run.reported.tokens_per_s or 0.0 for run in runs] for runs in (ours, theirs))
    rows.append(_row("output tokens/s", mine, other, within))
    # By Little's law. A tool that takes its time from one answer to the next question has fewer than it was asked for.
    mine, other = (
        [
            (run.reported.tokens_per_s or 0.0) / output_tokens * run.reported.request_mean_ms / 1e3
            for run in runs
        ]
        for runs in (ours, theirs)
    )
    rows.append(_row("requests under way", mine, other, None))
    return rows


def _row(figure: str, ours: list[float], theirs: list[float], within: float | None) -> dict[str, Any]:
    difference = _difference(ours, theirs)
    held = within is not None and difference is not None
    return {
        "figure": figure,
        "ours": round(statistics.median(ours), 3),
        "aiperf": round(statistics.median(theirs), 3),
        "difference": difference,
        "rounds": [_share(run, other) for run, other in zip(ours, theirs, strict=True)],
        "agrees": abs(difference or 0.0) <= (within or 0.0) if held else None,
    }


def _difference(values: list[float], base: list[float]) -> float | None:
    """How much larger, as a share: the median over the rounds; None where nothing can be divided."""
    shares = [_share(first, second) for first, second in zip(values, base, strict=True)]
    known = [share for share in shares if share is not None]
    return round(statistics.median(known), 4) if known else None


def _share(first: float, second: float) -> float | None:
    """How much larger; None beside 0, which AIPerf gives to chunks that one read brought."""
    return round(first / second - 1, 4) if second else None


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    told = any("server" in row for row in result["rows"])
    head = ["", "`pipeline bench`", "AIPerf", "difference", "of single rounds"]
    head += ["the server's own clock", "ours beside it", "AIPerf beside it"] if told else []
    rows = []
    for row in result["rows"]:
        known = [share for share in row["rounds"] if share is not None]
        spread = f"{min(known):+.1%} to {max(known):+.1%}" if known else ""
        cells = [
            row["figure"],
            f"{row['ours']:.2f}",
            f"{row['aiperf']:.2f}",
            or_empty(row["difference"], "{:+.1%}"),
            spread,
        ]
        if told:
            cells += [or_empty(row.get("server"), "{:.2f}")]
            cells += [or_empty(row.get(f"{who}_beside_server"), "{:+.1%}") for who in ("ours", "aiperf")]
        inside = row.get("within_interval")
        verdict = {True: "agrees", False: "DIFFERS", None: ""}[row["agrees"]]
        rows.append([*cells, "{} of {}".format(*inside) if inside else "", verdict])
    head += ["AIPerf in our interval, of rounds", f"within {result['within']:.0%}"]
    load = f"{result['requests']} requests of {result['input_tokens']} and {result['output_tokens']} tokens"
    return f"{load}, {result['concurrency']} at a time, {result['rounds']} rounds.\n\n" + markdown(head, rows)


def find_server(chosen: argparse.Namespace, stack: ExitStack, folder: Path) -> Server:
    """The server that both ask, started if need be."""
    tokenizer = chosen.tokenizer or ROOT / "recipes/checkpoints/support-target"
    if chosen.url:
        return Server(chosen.url, chosen.model, tokenizer.resolve())
    if chosen.recipe:
        store, report = Store.at(None), progress.for_stream()
        # So that answers are the engine's, and not the cache's.
        recipe = load_recipe(chosen.recipe, ("cache.enabled=false",))
        Builder(prepare(recipe, store, progress=report), store, report).run()
        served = stack.enter_context(serving(recipe.argv, recipe.name, store, folder / "logs"))
        return Server(served.record.gateway_url, recipe.name, tokenizer.resolve())
    if chosen.gateway:
        delays = (chosen.first_ms, chosen.gap_ms, chosen.output_tokens)
        upstream, _ = stack.enter_context(running(SCRIPTED, *delays))
        port, _ = stack.enter_context(running(HERE / "gateway_server.py", f"127.0.0.1:{upstream}", 1))
        return Server(f"http://127.0.0.1:{port}", "tiny", tokenizer.resolve(), scripted=True)
    port, _ = stack.enter_context(running(HERE / "stand_in.py", chosen.first_ms, chosen.gap_ms))
    url = f"http://127.0.0.1:{port}"
    return Server(url, "stand-in", tokenizer.resolve(), f"{url}/told", scripted=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gateway", action="store_true", help="our gateway in front of scripted answers")
    parser.add_argument("--recipe", help="serve this recipe, and ask its gateway")
    parser.add_argument("--url", help="of an OpenAI-compatible server that runs already, without /v1")
    parser.add_argument("--model", default="", help="name of the model, with --url")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="of the model; has a tokenizer.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=200, help="of each run")
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--first-ms", type=float, default=200.0, help="of the stand-in: about its TTFT")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="of the stand-in: about its ITL")
    parser.add_argument("--within", type=float, default=0.05, help="share by which medians may differ")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, not as a table")
    chosen = parser.parse_args()
    aiperf = peer_environment("aiperf") / "aiperf"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeline-agreement-")))
        server = find_server(chosen, stack, folder)
        comparison = Comparison(server, chosen, folder, aiperf)
        ways = {name: name for name in ("pipeline bench", "AIPerf")}
        rows = compare(
            in_turns(ways, comparison.run, chosen.rounds, warm_up=0), chosen.within, chosen.output_tokens
        )
    told = ("concurrency", "requests", "input_tokens", "output_tokens", "rounds", "within")
    asked = {name: getattr(chosen, name) for name in told}
    result = {"server": server.model, **asked, "rows": rows}
    print(json.dumps(result, indent=1) if chosen.json else table(result))
    return int(any(row["agrees"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
