"""What a gateway adds: time to the first token, tokens a second at 1 and at 16 streams, beside LiteLLM's proxy, and the
processor time of ours for each token, which says the most where other programs run, too.

    python benchmarks/gateway.py [--peers] [--triton HOST:PORT] [--also HOST:PORT/MODEL] [--json]

Every server runs in a process of its own and sends as fast as it can, so that what a gateway costs is as large as it
will ever be. Added TTFT is that through a gateway, less that of asking what stands behind it directly: for ours the
model server by gRPC (`pipeline.client.testing.FakeServer`); for LiteLLM an OpenAI-compatible server that only
writes bytes that it has encoded before, which is cheaper than any model server. The load is that of `pipeline bench`:
so many streams at a time, each of which asks again when its answer has ended. The ways take turns, round by round.

`--peers`: LiteLLM, too, which is installed into an environment of its own. `--triton`: ours stands in front of that
server instead. `--also`: an OpenAI-compatible server that runs already.

Triton's own OpenAI front end has its Triton in its own process, and its bindings come in Triton's container only.
There, each with the same model (`benchmarks/models`), and its added TTFT is beside asking the other Triton by gRPC:

    tritonserver --model-repository benchmarks/models
    python3 openai_frontend/main.py --model-repository benchmarks/models --tokenizer FOLDER
    python benchmarks/gateway.py --triton localhost:8001 --also localhost:9000/tensorrt_llm_bls
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import in_turns, markdown, or_empty, paired, peer_environment, running
from pipeline.bench.arrivals import Load
from pipeline.bench.load import Period, run_load
from pipeline.bench.result import ServerFigures
from pipeline.bench.summary import summarize
from pipeline.bench.targets import OpenAITarget, Target, TritonTarget
from pipeline.bench.workload import Conversation, Turn

STREAMS, START_S, TIMEOUT_S = (1, 16), 120, 120.0
MODEL = "tensorrt_llm_bls"
KEY = "sk-benchmark-of-the-gateway"  # LiteLLM wants one
QUESTION = "Where is my parcel?"

MODEL_SERVER = """
import sys
from pipeline.client.testing import FakeServer, Reply
with FakeServer(Reply([f"token{n} " for n in range(int(sys.argv[1]))])) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
GATEWAY = """
import sys, tempfile
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from pipeline.client import AsyncClient, ChatTemplate, PromptLimit
from pipeline.gateway.limits import FairQueue
from pipeline.gateway.app import Gateway
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.server import GatewayServer
from pipeline.gateway.tenants import Tenants

template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}")
tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
served = ServedModel(
    name="tiny", created=0, deployment="", client=AsyncClient(sys.argv[1], template=template),
    template=template, prompt_limit=PromptLimit(tokenizer, 4096), max_output_tokens=4096,
    queue=FairQueue(64, max_waiting=256),
)
server = GatewayServer(Gateway({"tiny": served}, Tenants()), "127.0.0.1", 0)
server.on_start = lambda: print(server.port, flush=True)
server.run()
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
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
async def answer(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\\r\\n")[1:] if line)
            await reader.readexactly(int(lines.get(b"content-length", b"0")))
            writer.write(HEAD)
            for event in EVENTS:
                writer.write(event)
                await asyncio.sleep(0)
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
    """A server to ask. `pid`: whose processor time is taken, 0 for none; `behind`: name of what stands behind it."""

    target: Callable[[], Target]
    conversation: Conversation
    pid: int = 0
    behind: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one load saw; `cpu_us`: processor time of the server for each token."""

    ttft_ms: float
    tokens_per_s: float
    cpu_us: float


def over_grpc(url: str) -> Way:
    """Triton, by our client."""
    conversation = Conversation((Turn(f"user: {QUESTION}\n"),), chat=False)
    return Way(lambda: TritonTarget(url, MODEL, None, timeout_s=TIMEOUT_S), conversation)


def over_http(address: str, model: str, behind: str = "", pid: int = 0) -> Way:
    """A server of OpenAI's API."""
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"http://{address}"
    return Way(
        lambda: OpenAITarget(url, model, timeout_s=TIMEOUT_S, headers=headers),
        Conversation((Turn(QUESTION),)),
        pid,
        behind,
    )


@contextmanager
def litellm(upstream: int, folder: Path) -> Iterator[int]:
    """LiteLLM's proxy in front of the server at port `upstream`."""
    model = {"model": "openai/tiny", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "tiny", "litellm_params": model}]}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    settings = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": KEY,
    }
    process = subprocess.Popen(
        [
            *(str(peer_environment("litellm") / "litellm"), "--config", str(folder / "config.yaml")),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(port, process)
        yield port
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("LiteLLM's proxy did not start") from None
            time.sleep(0.2)


async def measure(way: Way, streams: int) -> Sample:
    """Put so many streams on one server, for a few answers of each."""
    period = Period(None, max(16, 3 * streams), warm_up_requests=streams)
    before = processor_s(way.pid)
    async with way.target() as target:
        records = await run_load(
            target, Load("concurrency", streams), itertools.repeat(way.conversation), period,
            sampling={"max_tokens": 4096}, seed=0,
        )  # fmt: skip
    level = summarize(records, None, ServerFigures())
    if level.failed_share:
        raise SystemExit(f"requests failed: {level.requests} {level.errors}")
    tokens = sum(one.stats.chunks for one in (*records.warm_up, *records.counted))
    cpu_us = (processor_s(way.pid) - before) / tokens * 1e6
    return Sample(level.latencies["ttft"].p50, level.output_tokens_per_s, cpu_us)


def processor_s(pid: int) -> float:
    """Processor time that a process has taken, as user and as system; 0 for no process."""
    if not pid:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(samples: dict[str, list[Sample]], ways: dict[str, Way], streams: int) -> list[dict[str, Any]]:
    """One row for each way: medians of its rounds, and of the pairs with what stands behind it."""
    rows: list[dict[str, Any]] = []
    for name, taken in samples.items():
        row: dict[str, Any] = {
            "way": name,
            "streams": streams,
            "ttft_ms": round(statistics.median(one.ttft_ms for one in taken), 3),
            "tokens_per_s": round(statistics.median(one.tokens_per_s for one in taken)),
            "added_ttft_ms": None,
            "cpu_us_per_token": None,
        }
        if ways[name].behind:
            behind = samples[ways[name].behind]
            row["added_ttft_ms"] = round(paired(taken, behind, lambda a, b: a.ttft_ms - b.ttft_ms), 3)
        if ways[name].pid:
            row["cpu_us_per_token"] = round(statistics.mean(one.cpu_us for one in taken), 1)
        rows.append(row)
    return rows


def table(result: Any) -> str:
    """What is printed, and shown on the page of measurements."""
    rows = [
        (
            row["way"],
            row["streams"],
            f"{row['ttft_ms']:.2f} ms",
            or_empty(row["added_ttft_ms"], "{:+.2f} ms"),
            f"{row['tokens_per_s']:,}",
            or_empty(row["cpu_us_per_token"], "{:.0f} µs"),
        )
        for row in result["rows"]
    ]
    head = ("", "streams", "TTFT", "added TTFT", "tokens/s", "processor time a token")
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true", help="LiteLLM, too")
    parser.add_argument(
        "--triton", metavar="HOST:PORT", help="gRPC of the server that ours stands in front of"
    )
    parser.add_argument(
        "--also", metavar="HOST:PORT/MODEL", help="an OpenAI-compatible server that runs already"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped then, too
    rows = []
    with ExitStack() as stack:
        triton = chosen.triton or f"127.0.0.1:{stack.enter_context(running(MODEL_SERVER, chosen.tokens))[0]}"
        ours, pid = stack.enter_context(running(GATEWAY, triton))
        direct = "model server, gRPC"
        ways = {
            direct: over_grpc(triton),
            "pipeline gateway": over_http(f"127.0.0.1:{ours}", "tiny", direct, pid),
        }
        if chosen.peers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            plain, _ = stack.enter_context(running(BYTES_SERVER, chosen.tokens))
            proxy = stack.enter_context(litellm(plain, folder))
            ways["bytes server, HTTP"] = over_http(f"127.0.0.1:{plain}", "tiny")
            ways["LiteLLM proxy"] = over_http(f"127.0.0.1:{proxy}", "tiny", "bytes server, HTTP")
        if chosen.also:
            address, _, model = chosen.also.partition("/")
            ways[address] = over_http(address, model, direct if chosen.triton else "")
        for streams in STREAMS:
            found = in_turns(ways, lambda way: asyncio.run(measure(way, streams)), chosen.rounds)  # noqa: B023
            rows += summary(found, ways, streams)
    result = {"rounds": chosen.rounds, "tokens": chosen.tokens, "rows": rows}
    print(json.dumps(result, indent=1) if chosen.json else table(result))


if __name__ == "__main__":
    main()
