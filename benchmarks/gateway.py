"""What a gateway adds: time to the first token, tokens a second at 1 and at 16 streams, beside LiteLLM's proxy, and the
processor time of ours for each token, which says the most where other programs run, too.

    python benchmarks/gateway.py [--peers FOLDER] [--triton HOST:PORT] [--also HOST:PORT/MODEL]

Every server runs in a process of its own and sends as fast as it can, so that what a gateway costs is as large as it
will ever be. Added TTFT is that through a gateway, less that of asking what stands behind it directly: for ours the
model server by gRPC (`pipeline.client.testing.FakeServer`); for LiteLLM an OpenAI-compatible server that only
writes bytes that it has encoded before, which is cheaper than any model server. The ways take turns, round by round.

`--peers`: LiteLLM is installed there, into a virtual environment of its own. `--triton`: ours stands in front of that
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
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.client import AsyncClient

STREAMS, START_S = 16, 120
LITELLM = "litellm[proxy]==1.106.2"
KEY = "sk-benchmark-of-the-gateway"  # LiteLLM wants one
MESSAGES = [{"role": "user", "content": "Where is my parcel?"}]
Sample = tuple[float, float]  # TTFT in ms, tokens a second of all streams together
Ask = Callable[[], Awaitable[tuple[float, int]]]  # one stream: TTFT in s, tokens

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
def event(delta, reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    data = b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\\n\\n"
    return b"%x\\r\\n%s\\r\\n" % (len(data), data)
EVENTS = [event({"role": "assistant", "content": ""})]
EVENTS += [event({"content": f"token{n} "}) for n in range(int(sys.argv[1]))] + [event({}, "stop")]
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


@contextmanager
def running(program: str, *arguments: object) -> Iterator[tuple[int, int]]:
    """Port, which it prints, and process id of a Python program; stopped at the end."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()


@contextmanager
def litellm(folder: Path, upstream: int) -> Iterator[int]:
    """LiteLLM's proxy in front of the server at port `upstream`; installed into `folder` if it is not there."""
    if not (folder / "bin" / "litellm").is_file():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", LITELLM], check=True)
    model = {"model": "openai/tiny", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    config = {"model_list": [{"model_name": "tiny", "litellm_params": model}]}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
    command = [
        str(folder / "bin" / "litellm"),
        "--config",
        str(folder / "config.yaml"),
        "--host",
        "127.0.0.1",
    ]
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        env={
            **os.environ,
            "LITELLM_LOG": "ERROR",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_MASTER_KEY": KEY,
        },
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


def by_http(address: tuple[str, int], model: str) -> Ask:
    """One chat completion, its events read as they come, with as little work as possible."""
    body = json.dumps({"model": model, "messages": MESSAGES, "stream": True, "max_tokens": 4096}).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
        % (KEY.encode(), len(body), body)
    )

    async def ask() -> tuple[float, int]:
        reader, writer = await asyncio.open_connection(*address)
        began, first, received = time.perf_counter(), 0.0, b""
        writer.write(request)
        while data := await reader.read(65536):
            received += data
            if not first and b'"content":"t' in received.replace(b": ", b":"):
                first = time.perf_counter() - began
        writer.close()
        assert received.startswith(b"HTTP/1.1 200"), received[:2000].decode(errors="replace")
        return first, received.count(b"token")

    return ask


def by_grpc(url: str) -> Ask:
    """One stream of pipeline.client."""
    client = AsyncClient(url)

    async def ask() -> tuple[float, int]:
        async with client.stream("user: Where is my parcel?\n", max_tokens=4096) as stream:
            count = len([chunk async for chunk in stream if chunk.text])
            return (stream.stats.ttft_ms or 0.0) / 1e3, count

    return ask


async def measure(ways: dict[str, Ask], streams: int, rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, ask in ways.items():
            began = time.perf_counter()
            answers = await asyncio.gather(*(ask() for _ in range(streams)))
            rate = sum(count for _, count in answers) / (time.perf_counter() - began)
            if number >= 2:  # the first two warm up
                samples[name].append((statistics.median(first for first, _ in answers) * 1e3, rate))
    return samples


def report(samples: dict[str, list[Sample]], behind: dict[str, str], streams: int) -> None:
    print(f"{streams} stream{'s' if streams > 1 else ''}")
    for name, taken in samples.items():
        line = f"  {name:<26} TTFT {statistics.median(s[0] for s in taken):8.2f} ms"
        line += f"   {statistics.median(s[1] for s in taken):8,.0f} tokens/s"
        if name in behind:
            pairs = zip(taken, samples[behind[name]], strict=True)  # that met the same load
            line += f"   added TTFT {statistics.median(a[0] - b[0] for a, b in pairs):+7.2f} ms"
        print(line, flush=True)


def processor_s(pid: int) -> float:
    """Processor time that a process has taken, as user and as system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(ways: dict[str, Ask], behind: dict[str, str], rounds: int, tokens: int, ours: int) -> None:
    for streams in (1, STREAMS):
        before = processor_s(ours)
        report(await measure(ways, streams, rounds), behind, streams)
        each = (processor_s(ours) - before) / (streams * (rounds + 2) * tokens)
        print(f"  {'pipeline gateway':<26} {each * 1e6:.0f} us of processor time a token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--triton", metavar="HOST:PORT", help="gRPC of the server that ours stands in front of"
    )
    parser.add_argument(
        "--also", metavar="HOST:PORT/MODEL", help="an OpenAI-compatible server that runs already"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=200)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped then, too
    with ExitStack() as stack:
        triton = chosen.triton or f"127.0.0.1:{stack.enter_context(running(MODEL_SERVER, chosen.tokens))[0]}"
        ours, pid = stack.enter_context(running(GATEWAY, triton))
        ways = {
            "model server, gRPC": by_grpc(triton),
            "pipeline gateway": by_http(("127.0.0.1", ours), "tiny"),
        }
        behind = {"pipeline gateway": "model server, gRPC"}
        if chosen.peers:
            plain, _ = stack.enter_context(running(BYTES_SERVER, chosen.tokens))
            proxy = stack.enter_context(litellm(chosen.peers, plain))
            ways["bytes server, HTTP"] = by_http(("127.0.0.1", plain), "tiny")
            ways["LiteLLM proxy"] = by_http(("127.0.0.1", proxy), "tiny")
            behind["LiteLLM proxy"] = "bytes server, HTTP"
        if chosen.also:
            address, _, model = chosen.also.partition("/")
            host, _, port = address.rpartition(":")
            ways[address] = by_http((host, int(port)), model)
            if chosen.triton:
                behind[address] = "model server, gRPC"
        asyncio.run(run(ways, behind, chosen.rounds, chosen.tokens, pid))


if __name__ == "__main__":
    main()
