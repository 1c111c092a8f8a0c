"""Cost of a gateway: added time to first token, tokens a second and processor time a token, beside its peers.

    python benchmarks/gateway.py [--peers] [--triton HOST:PORT] [--also HOST:PORT/MODEL] [--json]

At 1, 16 and 128 streams, at full speed (the model server sends as fast as it can, so that what a gateway costs is as
large as it will ever be) and at a model's pace (a token every GAP_MS on each stream). The load is that of `pipeline
bench`: so many streams at a time, each of which asks again when its answer has ended. The ways take turns, round by
round.

Every server runs in a process of its own. Added TTFT is that through a gateway, less that of asking what stands behind
it directly, at the same percentile: for ours the model server by gRPC (`pipeline.client.testing.FakeServer`); for
LiteLLM an OpenAI-compatible server that only writes bytes that it has encoded before, which is cheaper than any model
server. vLLM's API server has nothing behind it: its engine is a stand-in within its process
(`benchmarks/peers/vllm_server.py`), so all of its TTFT is added, and what its messages to an engine and its detokenizer
cost is not in its figures.

Processor time is that of the gateway's processes, of all tokens. On a machine with few cores, servers and load take it
from each other: tokens a second at full speed then say what all processes of a way cost together, and several workers
cannot show that they scale.

`--peers`: LiteLLM and vLLM, too, which are installed into environments of their own (vLLM: about 3 GB). `--triton`:
ours stands in front of that server instead. `--also`: an OpenAI-compatible server that runs already.

Triton's own OpenAI front end has its Triton in its own process, and its bindings come in Triton's container only: there
is no package of them. There, each with the same model (`benchmarks/models`), and its added TTFT is beside asking the
other Triton by gRPC:

    tritonserver --model-repository benchmarks/models
    python3 openai_frontend/main.py --model-repository benchmarks/models --tokenizer FOLDER
    python benchmarks/gateway.py --triton localhost:8001 --also localhost:9000/tensorrt_llm_bls
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.closed_loop import closed_loop
from benchmarks.common import in_turns, markdown, or_empty, peer_environment, running
from benchmarks.gateway_server import CHECKPOINT
from pipeline.bench.statistics import percentile
from pipeline.bench.targets import OpenAITarget, Target, TritonTarget
from pipeline.bench.workload import ScriptedConversation, Turn

STREAMS, START_S, TIMEOUT_S = (1, 16, 128), 300, 120.0
GAP_MS = 20.0
HERE = Path(__file__).resolve().parent
MODEL = "tensorrt_llm_bls"
KEY = "sk-benchmark-of-the-gateway"  # LiteLLM wants one
QUESTION = "Where is my parcel?"

MODEL_SERVER = """
import sys
from pipeline.client.testing import FakeServer, Reply
tokens, gap_ms = int(sys.argv[1]), float(sys.argv[2])
with FakeServer(Reply([f"token{n} " for n in range(tokens)], delay_s=gap_ms / 1e3)) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
BYTES_SERVER = """
import asyncio, json, sys
def event(delta, reason=None, **more):
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": reason}]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    data = b"data: " + json.dumps({**head, "choices": choices, **more}).encode() + b"\\n\\n"
    return b"%x\\r\\n%s\\r\\n" % (len(data), data)
EVENTS = [event({"role": "assistant", "content": ""})]
EVENTS += [event({"content": f"token{n} "}) for n in range(int(sys.argv[1]))] + [event({}, "stop")]
EVENTS += [event(None, usage={"prompt_tokens": 8, "completion_tokens": int(sys.argv[1]), "total_tokens": 8})]
GAP_S = float(sys.argv[2]) / 1e3
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
async def answer(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\\r\\n")[1:] if line)
            await reader.readexactly(int(lines.get(b"content-length", b"0")))
            writer.write(HEAD)
            begun = asyncio.get_running_loop().time()
            for number, event in enumerate(EVENTS):
                writer.write(event)
                due = begun + min(number, len(EVENTS) - 3) * GAP_S - asyncio.get_running_loop().time()
                await asyncio.sleep(max(0.0, due) if GAP_S else 0)
            writer.write(b"e\\r\\ndata: [DONE]\\n\\n\\r\\n0\\r\\n\\r\\n")
            await writer.drain()
            if lines.get(b"connection") == b"close":
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Way:
    """A server to ask. `pid`: process whose processor time is taken, 0 for none; `behind`: name of its back end."""

    target: Callable[[], Target]
    conversation: ScriptedConversation
    pid: int = 0
    # None: nothing stands behind it that could be asked directly.
    behind: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one load; `cpu_us`: processor time of the server and of its children for each token."""

    ttft_ms: Sequence[float]
    tokens_per_s: float
    cpu_us: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast model servers are, and how much is asked of them."""

    name: str
    gap_ms: float
    tokens: int
    # Requests at so many streams, or so many for each stream, if that is more.
    requests: int
    per_stream: int


FULL_SPEED, MODEL_PACE = "full speed", f"a token every {GAP_MS:g} ms"


def over_grpc(url: str) -> Way:
    """Triton, by our client."""
    conversation = ScriptedConversation((Turn(f"user: {QUESTION}\n"),), chat=False)
    return Way(lambda: TritonTarget(url, MODEL, None, timeout_s=TIMEOUT_S), conversation)


def over_http(address: str, model: str, behind: str | None = None, pid: int = 0) -> Way:
    """A server of OpenAI's API."""
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"http://{address}"
    return Way(
        lambda: OpenAITarget(url, model, timeout_s=TIMEOUT_S, headers=headers),
        ScriptedConversation((Turn(QUESTION),)),
        pid,
        behind,
    )


@contextmanager
def peer(
    name: str, words: Sequence[str | Path], port: int, settings: Mapping[str, str] = {}
) -> Iterator[tuple[int, int]]:
    """A peer's server as a process of its own. Yields its port, once it takes connections, and its process id."""
    process = subprocess.Popen(
        [str(word) for word in words],
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit(f"{name} did not start: {shlex.join(map(str, words))}") from None
                time.sleep(0.2)
        yield port, process.pid
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def litellm(upstream: int, folder: Path) -> AbstractContextManager[tuple[int, int]]:
    """LiteLLM's proxy in front of the server at port `upstream`."""
    model = {"model": "openai/tiny", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "tiny", "litellm_params": model}]}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    settings = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": KEY,
    }
    program = peer_environment("litellm") / "litellm"
    words = (program, "--config", folder / "config.yaml", "--host", "127.0.0.1", "--port", str(port))
    return peer("LiteLLM's proxy", words, port, settings)


def vllm(pace: Pace) -> AbstractContextManager[tuple[int, int]]:
    """vLLM's API server on its stand-in engine."""
    port, program = free_port(), HERE / "peers" / "vllm_server.py"
    words = (
        peer_environment("vllm") / "python",
        program,
        str(port),
        str(pace.tokens),
        str(pace.gap_ms),
        CHECKPOINT,
    )
    return peer("vLLM's API server", words, port, {"VLLM_LOGGING_LEVEL": "ERROR"})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def measure(way: Way, streams: int, pace: Pace) -> Sample:
    """Put so many streams on one server, for a few answers of each."""
    requests = max(pace.requests, pace.per_stream * streams)
    before = processor_s(way.pid)
    records, level = await closed_loop(way.target(), way.conversation, streams, requests, pace.tokens)
    tokens = sum(request.stats.chunks for request in (*records.warm_up, *records.counted))
    cpu_us = (processor_s(way.pid) - before) / tokens * 1e6
    ttft_ms = [request.ttft_ms for request in records.counted if request.ttft_ms is not None]
    return Sample(ttft_ms, level.output_tokens_per_s, cpu_us)


def processor_s(pid: int) -> float:
    """Processor time that a process and its children have taken, as user and as system; 0 for no process."""
    if not pid:
        return 0.0
    first = psutil.Process(pid)
    used = [process.cpu_times() for process in (first, *first.children(recursive=True))]
    return sum(times.user + times.system for times in used)


def summary(
    samples: Mapping[str, Sequence[Sample]], ways: Mapping[str, Way], streams: int, pace: Pace
) -> list[dict[str, Any]]:
    """One row for each way, of all its rounds together."""

    def ttft(name: str, percent: float) -> float:
        return percentile([ttft_ms for sample in samples[name] for ttft_ms in sample.ttft_ms], percent)

    rows: list[dict[str, Any]] = []
    for name, taken in samples.items():
        way = ways[name]
        row: dict[str, Any] = {
            "pace": pace.name,
            "way": name,
            "streams": streams,
            "tokens_per_s": round(statistics.median(run.tokens_per_s for run in taken)),
            "cpu_us_per_token": round(statistics.mean(run.cpu_us for run in taken), 1) if way.pid else None,
        }
        for percent in (50, 99):
            row[f"ttft_p{percent}_ms"] = round(ttft(name, percent), 3)
            behind = 0.0 if way.behind is None else ttft(way.behind, percent)
            row[f"added_ttft_p{percent}_ms"] = round(ttft(name, percent) - behind, 3) if way.pid else None
        rows.append(row)
    return rows


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements: a table for each pace."""
    head = (
        "",
        "streams",
        "added TTFT p50",
        "added TTFT p99",
        "TTFT p50",
        "tokens/s",
        "processor time a token",
    )
    tables = []
    for pace in dict.fromkeys(row["pace"] for row in result["rows"]):
        rows = [
            (
                row["way"],
                row["streams"],
                or_empty(row["added_ttft_p50_ms"], "{:+.1f} ms"),
                or_empty(row["added_ttft_p99_ms"], "{:+.1f} ms"),
                f"{row['ttft_p50_ms']:.1f} ms",
                f"{row['tokens_per_s']:,}",
                or_empty(row["cpu_us_per_token"], "{:.0f} µs"),
            )
            for row in result["rows"]
            if row["pace"] == pace
        ]
        tables.append(f"At {pace}:\n\n{markdown(head, rows)}")
    return "\n\n".join(tables)


def run(pace: Pace, chosen: argparse.Namespace, stack: ExitStack) -> list[dict[str, Any]]:
    """Start all servers for one pace, and measure them."""
    triton = (
        chosen.triton
        or f"127.0.0.1:{stack.enter_context(running(MODEL_SERVER, pace.tokens, pace.gap_ms))[0]}"
    )
    direct = "model server, gRPC"
    ways = {direct: over_grpc(triton)}
    for workers in chosen.workers:
        port, pid = stack.enter_context(running(HERE / "gateway_server.py", triton, workers))
        name = "pipeline gateway" if workers == 1 else f"pipeline gateway, {workers} workers"
        ways[name] = over_http(f"127.0.0.1:{port}", "tiny", direct, pid)
    if chosen.peers:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain, _ = stack.enter_context(running(BYTES_SERVER, pace.tokens, pace.gap_ms))
        port, pid = stack.enter_context(litellm(plain, folder))
        ways["bytes server, HTTP"] = over_http(f"127.0.0.1:{plain}", "tiny")
        ways["LiteLLM proxy"] = over_http(f"127.0.0.1:{port}", "tiny", "bytes server, HTTP", pid)
        port, pid = stack.enter_context(vllm(pace))
        ways["vLLM API server, stand-in engine"] = over_http(f"127.0.0.1:{port}", "tiny", None, pid)
    if chosen.also:
        address, _, model = chosen.also.partition("/")
        ways[address] = over_http(address, model, direct if chosen.triton else None)
    rows = []
    for streams in chosen.streams:
        found = in_turns(
            ways, lambda way: asyncio.run(measure(way, streams, pace)), chosen.rounds, warm_up=1  # noqa: B023
        )  # fmt: skip
        rows += summary(found, ways, streams, pace)
        print(f"{pace.name}, {streams} streams: done", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true", help="LiteLLM and vLLM, too")
    parser.add_argument(
        "--triton", metavar="HOST:PORT", help="gRPC of the server that ours stands in front of"
    )
    parser.add_argument(
        "--also", metavar="HOST:PORT/MODEL", help="an OpenAI-compatible server that runs already"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=100, help="of an answer at full speed")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), metavar="N")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="of our gateway; by default 1 and 2",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped then, too
    rows = []
    paces = (
        Pace(FULL_SPEED, 0.0, chosen.tokens, requests=40, per_stream=2),
        Pace(MODEL_PACE, GAP_MS, max(2, chosen.tokens // 4), requests=10, per_stream=2),
    )
    for pace in paces:
        with ExitStack() as stack:
            rows += run(pace, chosen, stack)
    result = {"rounds": chosen.rounds, "tokens": chosen.tokens, "rows": rows}
    print(json.dumps(result, indent=1) if chosen.json else table(result))


if __name__ == "__main__":
    main()
