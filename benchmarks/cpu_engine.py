"""The CPU engine on the checked-in pair: tokens a second and time to the first token, with and without the draft.

    python benchmarks/cpu_engine.py [--rounds 5] [--questions 6] [--threads 2] [--json]

Each stream asks held-out questions one after the other, greedy, and ends where the model ends its answers. The ways
take turns, round by round, so that other work on the machine meets all alike; medians are reported. On a busy machine
trust the CPU time a token. "forward" is the bare OpenVINO step of one token: no stream can be faster without a draft.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import markdown
from pipeline.progress import Silent
from pipeline.runtimes.cpu.engine import Engine, EngineRequest, EngineSettings, RequestOutput
from pipeline.runtimes.cpu.engine.block_manager import BlockTable
from pipeline.runtimes.cpu.engine.paged_model import PagedModel, TokenSlice
from pipeline.runtimes.cpu.ir import build_ir

ROOT = Path(__file__).resolve().parents[1]
TURN = (
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
STREAMS = (1, 8, 16)
WAYS = ("no draft", "draft", "adaptive")  # always drafting, and while it is measured to pay


@dataclass
class Stream:
    """Asks its prompts one after the other, on the engine's thread."""

    engine: Engine
    name: str
    prompts: list[list[int]]
    end_id: int | None
    most: int = 96
    done: threading.Event = field(default_factory=threading.Event)
    tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def ask(self) -> None:
        prompt = tuple(self.prompts.pop())
        self.engine.submit(EngineRequest(self.name, prompt, self.most, self.end_id), self.take)

    def take(self, output: RequestOutput) -> None:
        self.tokens += len(output.tokens)
        if (metrics := output.metrics) is None:
            return
        assert output.error is None, output.error
        self.ttft_ms.append((metrics.first_token_ns - metrics.arrival_ns) / 1e6)
        self.drafted += metrics.draft_tokens_total
        self.accepted += metrics.draft_tokens_accepted
        if self.prompts:
            self.ask()
        else:
            self.done.set()


def measure(engine: Engine, prompts: list[list[int]], streams: int, end_id: int) -> dict[str, float]:
    """All streams together; each asks all prompts, from a place of its own."""
    asking = [
        Stream(engine, str(at), prompts[at % len(prompts) :] + prompts[: at % len(prompts)], end_id)
        for at in range(streams)
    ]
    started, cpu = time.perf_counter(), time.process_time()
    for stream in asking:
        stream.ask()
    for stream in asking:
        stream.done.wait()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokens = sum(stream.tokens for stream in asking)
    drafted = sum(stream.drafted for stream in asking)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "cpu_us_per_token": 1e6 * cpu / tokens,
        "ttft_ms": statistics.median(value for stream in asking for value in stream.ttft_ms),
        "acceptance": sum(stream.accepted for stream in asking) / drafted if drafted else 0.0,
    }


def forward_us(folder: Path, settings: EngineSettings) -> float:
    model = PagedModel(folder, settings)
    model.allocate([8])
    step = [TokenSlice([9], 40, [BlockTable(np.arange(2, dtype=np.int32))], 1)]
    times = []
    for _ in range(300):
        started = time.perf_counter()
        model.forward(step)
        times.append(1e6 * (time.perf_counter() - started))
    return statistics.median(times)


def questions(count: int) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(ROOT / "recipes/checkpoints/support-target/tokenizer.json"))
    lines = (ROOT / "calibration/support/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["messages"][0]["content"] for line in lines[:count]]
    return [tokenizer.encode(TURN.format(text), add_special_tokens=False).ids for text in texts]


def end_id() -> int:
    ids = json.loads((ROOT / "recipes/checkpoints/support-target/config.json").read_text())["eos_token_id"]
    return int(ids[0] if isinstance(ids, list) else ids)


def run(rounds: int, count: int, threads: int | None) -> dict[str, object]:
    samples: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        target, draft = Path(temporary, "target"), Path(temporary, "draft")
        for folder in (target, draft):
            build_ir(ROOT / f"recipes/checkpoints/support-{folder.name}", folder, progress=Silent())
        common = {
            "max_concurrency": max(STREAMS),
            "max_draft_tokens": 4,
            "prefix_caching": False,
            "threads": threads,
        }
        engines = {
            way: Engine(
                target,
                None if way == "no draft" else draft,
                EngineSettings(**common, adapt_speculation=way == "adaptive"),  # type: ignore[arg-type]
            )
            for way in WAYS
        }
        for at in range(-1, rounds):  # the first round warms up
            for streams in STREAMS:
                for way, engine in engines.items():
                    sample = measure(engine, questions(count), streams, end_id())
                    if at >= 0:
                        samples.setdefault((way, streams), []).append(sample)
        for engine in engines.values():
            engine.close()
        forward = {
            folder.name: forward_us(folder, EngineSettings(threads=threads)) for folder in (target, draft)
        }
    rows = []
    for (way, streams), taken in samples.items():
        row = {key: statistics.median(sample[key] for sample in taken) for key in taken[0]}
        rows.append({"way": way, "streams": streams} | row)
    alone = {str(row["way"]): row["seconds"] for row in rows if row["streams"] == 1}
    for row in rows:
        row["times_one_stream"] = row["seconds"] / alone[str(row["way"])]  # type: ignore[operator]
    return {"rounds": rounds, "questions": count, "forward_us": forward, "rows": rows}


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    rows = [
        (
            row["way"],
            row["streams"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ttft_ms']:.1f} ms",
            f"{row['cpu_us_per_token']:.0f} µs",
            f"{row['acceptance']:.0%}" if row["acceptance"] else "",
            f"{row['times_one_stream']:.2f}",
        )
        for row in result["rows"]
    ]
    steps = ", ".join(f"{name} {value:.0f} µs" for name, value in result["forward_us"].items())
    head = ("way", "streams", "tokens/s", "TTFT", "processor time a token", "accepted", "time of one stream")
    return f"A step of one token by OpenVINO alone: {steps}.\n\n{markdown(head, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=6, help="asked by each stream in each round")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    result = run(arguments.rounds, arguments.questions, arguments.threads)
    print(json.dumps(result, indent=2) if arguments.json else table(result))


if __name__ == "__main__":
    main()
