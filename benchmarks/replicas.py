"""Gain of spreading over several replicas: KV reuse and time to first token of conversations, by `gateway.spread`.

    python benchmarks/replicas.py [--servers 2 4] [--rounds 3] [--json]

Starts so many real Triton servers with one package of `tiny-cpu`, and in front of them `pipeline gateway`, once with
each way to spread requests; the ways take turns, round by round, with the same number of users. Every user has one
conversation after the other: a system prompt that all have, then eight questions, each with all that was said before,
and a pause to read between an answer and the next question. No two rounds ask the same.

    KV reuse    share of the tokens of all prompts that the engines had in their KV caches, by their own counters
    busiest     requests of the server that got the most, beside the mean of all

What the figures do not show: all servers share the processors of one machine with the gateway and the load. A
second replica adds no speed, and a prompt that one server need not compute leaves its processor time to the others. So
TTFT here is that of a busy machine, where saved work counts for more than it would on replicas with a GPU each; KV
reuse is the figure that carries over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import in_turns, markdown
from pipeline.bench.lengths import Lengths
from pipeline.bench.load import Period, run_load
from pipeline.bench.load_settings import Load
from pipeline.bench.statistics import percentile
from pipeline.bench.targets import OpenAITarget
from pipeline.bench.workload import ScriptedConversation, Shape, TemplateTokens, Words, synthetic
from pipeline.client import ChatTemplate
from pipeline.reading import read_tokenizer
from pipeline.serving.live import MetricsPage
from pipeline.serving.server import TritonServer
from pipeline.triton.deployment import ENTRY, TARGET_MODEL, Deployment

NAME = "replicas"
SPREADS = ("random", "least-load", "affinity")
# Eight turns fit into the 1,024 positions of the checkpoint.
PROMPT_TOKENS, ANSWER_TOKENS = 928, 32
OVERRIDES = (
    f"name={NAME}", "draft=null", "golden=null", f"limits.max_input_tokens={PROMPT_TOKENS}",
    f"limits.max_output_tokens={ANSWER_TOKENS}",
)  # fmt: skip
SHAPE = Shape(prefix_tokens=96, prefixes=1, turns=8)
QUESTIONS, ANSWERS = Lengths.parse("48-80"), Lengths.parse("8-24")
USERS_PER_SERVER, THINK_S = 4, 0.5
START_S, TIMEOUT_S, SETTLE_S = 120.0, 120.0, 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one load: TTFT of each answered request, failures, and the counters of the servers meanwhile."""

    ttft_ms: Sequence[float]
    failed: int
    prompt_tokens: float
    reused_tokens: float
    requests: Sequence[float]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of one server since it began."""

    prompt_tokens: float
    reused_tokens: float
    requests: float

    @classmethod
    def of(cls, server: TritonServer) -> Counts:
        """Read them from the server's page of metrics."""
        page = MetricsPage.fetch(server.metrics_url, timeout_s=20)
        if page is None:
            raise SystemExit(f"{server.metrics_url} does not answer")
        tokens = page.by("nv_trt_llm_general_metrics", "general_type", model=TARGET_MODEL)
        asked = page.by("nv_inference_request_success_total", "model")
        return cls(tokens["prompt_tokens"], tokens["prompt_tokens_reused"], asked.get(ENTRY, 0.0))


def built() -> Path:
    """The folder of the package."""
    words = [word for override in OVERRIDES for word in ("--set", override)]
    command = [sys.executable, "-m", "pipeline.cli.main", "build", "tiny-cpu", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(json.loads(done.stdout)["artifact"])


@contextmanager
def gateway(package: Path, servers: Sequence[TritonServer], spread: str) -> Iterator[str]:
    """Run `pipeline gateway` in front of the servers until the block ends. Yields its URL when all were probed."""
    command = [sys.executable, "-m", "pipeline.cli.main", "gateway", "--package", str(package), "--port", "0"]
    command += [word for server in servers for word in ("--endpoint", server.grpc_url)]
    # Its log has a line for each request.
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [*command, "--set", f"gateway.spread={spread}"], stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None, "it was started with a pipe"
            found = re.search(r"(http://\S+)/v1", process.stdout.readline())
            if found is None:
                log.seek(0)
                raise SystemExit(f"the gateway did not start: {log.read()[-1000:]}")
            deadline = time.monotonic() + START_S
            while not is_ready(found[1]):
                if time.monotonic() > deadline:
                    raise SystemExit("the gateway is not ready")
                time.sleep(0.1)
            # Until the last of the servers has been probed, too.
            time.sleep(SETTLE_S)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


def is_ready(url: str) -> bool:
    """Whether the gateway's `/readyz` says so."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


async def load(url: str, users: int, requests: int, conversations: Iterator[ScriptedConversation]) -> Any:
    """So many users, until so many requests were answered."""
    period = Period(None, requests, warm_up_requests=users)
    async with OpenAITarget(url, NAME, timeout_s=TIMEOUT_S) as target:
        return await run_load(
            target, Load("concurrency", users), conversations, period, sampling={"temperature": 0}, seed=0,
            think_s=THINK_S,
        )  # fmt: skip


class Comparison:
    """Takes one sample of a way to spread requests over some servers, whenever it is its turn."""

    def __init__(self, package: Path, servers: Sequence[TritonServer], requests: int) -> None:
        self._package, self._servers = package, servers
        self._users, self._requests = USERS_PER_SERVER * len(servers), requests * len(servers)
        folder = package / Deployment.load(package).tokenizer_dir
        self._words = Words(read_tokenizer(folder / "tokenizer.json"))
        self._around = TemplateTokens.of(ChatTemplate.from_directory(folder), self._words, system=True)
        self._seeds = random.Random(0)

    def measure(self, spread: str) -> Sample:
        """One load, of conversations that no server has seen."""
        conversations = synthetic(
            self._words, QUESTIONS, ANSWERS, SHAPE, most_prompt=PROMPT_TOKENS, most_answer=ANSWER_TOKENS,
            seed=self._seeds.getrandbits(32), around=self._around,
        )  # fmt: skip
        before = [Counts.of(server) for server in self._servers]
        with gateway(self._package, self._servers, spread) as url:
            records = asyncio.run(load(url, self._users, self._requests, conversations))
        # Until the engines have published what they counted.
        time.sleep(SETTLE_S)
        after = [Counts.of(server) for server in self._servers]
        ended = records.counted
        return Sample(
            [request.ttft_ms for request in ended if request.ttft_ms is not None],
            sum(request.outcome != "complete" for request in ended),
            sum(now.prompt_tokens - then.prompt_tokens for then, now in zip(before, after, strict=True)),
            sum(now.reused_tokens - then.reused_tokens for then, now in zip(before, after, strict=True)),
            [now.requests - then.requests for then, now in zip(before, after, strict=True)],
        )


def summary(servers: int, users: int, samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """One row for each way, of all its rounds together."""
    rows: list[dict[str, Any]] = []
    for spread, taken in samples.items():
        reuse = [run.reused_tokens / run.prompt_tokens for run in taken]
        busiest = [max(run.requests) / statistics.mean(run.requests) for run in taken]
        ttft_ms = [value for run in taken for value in run.ttft_ms]
        rows.append(
            {
                "servers": servers,
                "users": users,
                "spread": spread,
                "requests": len(ttft_ms),
                "failed": sum(run.failed for run in taken),
                "kv_reuse": round(
                    sum(run.reused_tokens for run in taken) / sum(run.prompt_tokens for run in taken), 3
                ),
                "kv_reuse_of_rounds": [round(min(reuse), 3), round(max(reuse), 3)],
                "ttft_p50_ms": round(percentile(ttft_ms, 50), 1),
                "ttft_p95_ms": round(percentile(ttft_ms, 95), 1),
                "ttft_p50_ms_of_rounds": [
                    round(bound(percentile(run.ttft_ms, 50) for run in taken), 1) for bound in (min, max)
                ],
                "busiest": round(statistics.mean(busiest), 2),
            }
        )
    return rows


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    rows = [
        (
            f"{row['servers']} servers, {row['users']} users: {row['spread']}",
            f"{row['requests']:,}",
            row["failed"],
            f"{row['kv_reuse']:.1%}",
            "{:.1%} to {:.1%}".format(*row["kv_reuse_of_rounds"]),
            f"{row['ttft_p50_ms']:.1f} ms",
            "{:.1f} to {:.1f} ms".format(*row["ttft_p50_ms_of_rounds"]),
            f"{row['ttft_p95_ms']:.1f} ms",
            f"{row['busiest']:.2f}",
        )
        for row in result["rows"]
    ]
    head = (
        f"{result['rounds']} rounds", "requests", "failed", "KV reuse", "of single rounds", "TTFT p50",
        "of single rounds", "TTFT p95", "busiest server",
    )  # fmt: skip
    return markdown(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=80, help="of a round, for each server")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped then, too
    package, rows = built(), []
    with ExitStack() as stack:
        servers: list[TritonServer] = []
        for count in sorted(chosen.servers):
            while len(servers) < count:
                servers.append(stack.enter_context(TritonServer.of_package(package)))
            comparison = Comparison(package, servers, chosen.requests)
            samples = in_turns({name: name for name in SPREADS}, comparison.measure, chosen.rounds, warm_up=0)
            rows += summary(count, USERS_PER_SERVER * count, samples)
            print(f"{count} servers: done", file=sys.stderr, flush=True)
    result = {"rounds": chosen.rounds, "rows": rows}
    print(json.dumps(result, indent=1) if chosen.json else table(result))
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
