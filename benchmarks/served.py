"""Cost of serving: the engine alone, beside the same package through the entry models of Triton.

    python benchmarks/served.py [--recipe tiny-cpu] [--rounds 3] [--tokens 96] [--prompt 64] [--json]
    python benchmarks/served.py --weights int4_awq       the Llama of benchmarks/cpu_peers.py, 191 million weights

At 1, 8 and 16 streams, each of which asks again when its answer has ended, greedy, for answers of one length. The
engine alone runs in this process, with the settings of the package, and hands its tokens to a counter. Through Triton,
this process reads text with `pipeline.client`; it takes processor time of the same machine. The ways take turns, round
by round; medians are reported. Processor time is that of all processes of a way, for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from benchmarks.closed_loop import closed_loop
from benchmarks.common import ENVIRONMENTS, in_turns, markdown, serving
from benchmarks.cpu_engine import Stream
from benchmarks.cpu_peers import WAYS, Workshop
from pipeline.bench.targets import TritonTarget
from pipeline.bench.workload import ScriptedConversation, Turn, Words
from pipeline.recipe import load_recipe
from pipeline.runtimes.cpu.engine import Engine, EngineSettings
from pipeline.runtimes.cpu.model_repository import DRAFT, TARGET
from pipeline.store import Store
from pipeline.triton.config import parameters_of, parse
from pipeline.triton.deployment import REPOSITORY, TARGET_MODEL, Deployment

FORMS = tuple(way.removeprefix("ours:") for ways in WAYS.values() for way in ways if way.startswith("ours:"))
STREAMS, ALONE, ENTRIES = (1, 8, 16), "engine alone", ("tensorrt_llm_bls", "ensemble")
ANSWERS = 4  # of each stream that count, in one round
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one load."""

    tokens_per_s: float
    cpu_us: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the load: its text, and the same as tokens."""

    text: str
    tokens: int
    prompt: tuple[int, ...]


def packaged_engine(package: Path) -> Engine:
    """The engine of a package, as its model `tensorrt_llm` makes it."""
    folder = package / REPOSITORY / TARGET_MODEL
    given = parameters_of(parse((folder / "config.pbtxt").read_text(encoding="utf-8")))
    numbers = {
        name: int(given[f"cpu_{name}"])
        for name in (
            "max_concurrency",
            "max_batch_tokens",
            "max_sequence_tokens",
            "max_draft_tokens",
            "kv_cache_mib",
            "threads",
        )
        if f"cpu_{name}" in given
    }
    settings: dict[str, Any] = {**numbers, "precision": given["cpu_precision"]}
    draft = folder / DRAFT if "cpu_draft_model_path" in given else None
    return Engine(folder / TARGET, draft, EngineSettings(**settings))


def alone(engine: Engine, asked: Asked, streams: int) -> Sample:
    """Ask the engine itself, for as many answers as through Triton."""
    asking = [
        Stream(engine, str(at), [list(asked.prompt)] * ANSWERS, end_id=None, most=asked.tokens)
        for at in range(streams)
    ]
    began, cpu = time.perf_counter(), time.process_time()
    for stream in asking:
        stream.ask()
    for stream in asking:
        stream.done.wait()
    tokens = sum(stream.tokens for stream in asking)
    return Sample(tokens / (time.perf_counter() - began), 1e6 * (time.process_time() - cpu) / tokens)


def served(url: str, entry: str, pids: tuple[int, ...], asked: Asked, streams: int) -> Sample:
    """Ask an entry model."""
    conversation = ScriptedConversation((Turn(asked.text, asked.tokens, exact=True),), chat=False)
    before = processor_s(pids) + time.process_time()
    target = TritonTarget(url, entry, None, timeout_s=TIMEOUT_S)
    records, level = asyncio.run(closed_loop(target, conversation, streams, ANSWERS * streams, asked.tokens))
    tokens = sum(request.stats.output_tokens or 0 for request in (*records.warm_up, *records.counted))
    used = processor_s(pids) + time.process_time() - before
    return Sample(level.output_tokens_per_s, 1e6 * used / tokens)


def processor_s(pids: tuple[int, ...]) -> float:
    """Processor time that processes have taken, as user and as system."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(time_.user + time_.system for time_ in times)


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Serve the recipe, and measure all ways."""
    source, store = chosen.recipe, Store.at(None)
    if chosen.weights:
        workshop = Workshop(ENVIRONMENTS / "cpu_peers", ENVIRONMENTS)
        source, store = str(workshop.recipe(chosen.weights)), Store.at(workshop.store)
    rows, recipe = [], load_recipe(source)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving((source, "--build", "--no-gateway"), recipe.name, store, Path(folder)) as deployment,
    ):
        record, package = deployment.record, deployment.record.deployment.parent
        tokenizer = Tokenizer.from_file(
            str(package / Deployment.load(package).tokenizer_dir / "tokenizer.json")
        )
        text = Words(tokenizer).text(chosen.prompt, random.Random(0))
        asked = Asked(text, chosen.tokens, tuple(tokenizer.encode(text).ids))
        pids = tuple(deployment.processes())
        engine = packaged_engine(package)
        ways: Mapping[str, Callable[[int], Sample]] = {
            ALONE: partial(alone, engine, asked),
            **{entry: partial(served, record.grpc_url, entry, pids, asked) for entry in ENTRIES},
        }
        for streams in chosen.streams:
            samples = in_turns(ways, lambda way: way(streams), chosen.rounds, warm_up=1)  # noqa: B023
            most = statistics.median(sample.tokens_per_s for sample in samples[ALONE])
            for way, taken in samples.items():
                speed = statistics.median(run.tokens_per_s for run in taken)
                rows.append(
                    {
                        "way": way,
                        "streams": streams,
                        "tokens_per_s": round(speed, 1),
                        "share": round(speed / most, 3),
                        "cpu_us": round(statistics.median(run.cpu_us for run in taken)),
                    }
                )
        engine.close()
    return {"recipe": recipe.name, "prompt": chosen.prompt, "tokens": chosen.tokens, "rows": rows}


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    rows = [
        (
            row["way"],
            row["streams"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['share']:.2f}",
            f"{row['cpu_us']:,} µs",
        )
        for row in result["rows"]
    ]
    head = ("way", "streams", "tokens/s", "beside the engine alone", "processor time a token")
    shape = f"{result['prompt']} tokens in, {result['tokens']} out"
    return f"`{result['recipe']}`, {shape}:\n\n{markdown(head, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="tiny-cpu")
    parser.add_argument(
        "--weights", choices=FORMS, help="form of the Llama of benchmarks/cpu_peers.py, in place of a recipe"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), metavar="N")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    chosen = parser.parse_args()
    result = run(chosen)
    print(json.dumps(result, indent=1) if chosen.json else table(result))


if __name__ == "__main__":
    main()
