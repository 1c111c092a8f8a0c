"""Cost of our client beside bare tritonclient: tokens a second and time to the first token, in one run.

    python benchmarks/client.py [--rounds 15] [--tokens 500]

All talk to one fake server in a process of its own, which sends as fast as it can, so that the client's part is as
large as it will ever be. The ways take turns, round by round, so that other work on the machine meets all alike.
Bare tritonclient is used as its examples show it: a callback that puts results into a queue, from which the tokens
are read as text; on a stream that stays open, of which a client can have only one, and on a new one for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio

from benchmarks.common import in_turns, markdown, paired, running
from pipeline.client import AsyncClient, Client

MODEL = "tensorrt_llm_bls"
SERVER = """
import sys
from pipeline.client.testing import FakeServer, Reply
with FakeServer(Reply([f"token{n} " for n in range(int(sys.argv[1]))])) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
PAIRS = (
    ("pipeline.client", "tritonclient, open stream"),
    ("pipeline.client", "tritonclient, new stream"),
    ("pipeline.client async", "tritonclient aio"),
)
Sample = tuple[float, float]  # TTFT in ms, tokens a second


class Bare:
    """tritonclient, blocking."""

    def __init__(self, url: str, *, keep_stream: bool) -> None:
        self.client = tritonclient.grpc.InferenceServerClient(url)
        self.results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.keep_stream = keep_stream
        if keep_stream:
            self._start()

    def _start(self) -> None:
        self.client.start_stream(callback=lambda result, error: self.results.put((result, error)))

    def __call__(self) -> Sample:
        start = time.perf_counter()
        if not self.keep_stream:
            self._start()
        self.client.async_stream_infer(MODEL, inputs(tritonclient.grpc), enable_empty_final_response=True)
        first, texts = 0.0, []
        while True:
            result, error = self.results.get()
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                texts.append(result.as_numpy("text_output").reshape(-1)[0].decode())
                first = first or time.perf_counter() - start
            if response.parameters["triton_final_response"].bool_param:
                break
        seconds = time.perf_counter() - start
        if not self.keep_stream:
            self.client.stop_stream()
        return first * 1e3, len(texts) / seconds


class Ours:
    """pipeline.client, blocking."""

    def __init__(self, url: str) -> None:
        self.client = Client(url)
        self.client.model()

    def __call__(self) -> Sample:
        start = time.perf_counter()
        first, count = 0.0, 0
        with self.client.stream("Hi", max_tokens=4096) as stream:
            for chunk in stream:
                if chunk.text:
                    count += 1
                    first = first or time.perf_counter() - start
            seconds = time.perf_counter() - start
        return first * 1e3, count / seconds


class BareAsync:
    """tritonclient.grpc.aio."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.client = loop.run_until_complete(self._connect(url))

    async def _connect(self, url: str) -> Any:
        return tritonclient.grpc.aio.InferenceServerClient(url)

    def __call__(self) -> Sample:
        return self.loop.run_until_complete(self._once())

    async def _once(self) -> Sample:
        start = time.perf_counter()

        async def requests() -> Any:
            yield {"model_name": MODEL, "inputs": inputs(tritonclient.grpc)}

        first, texts = 0.0, []
        async for result, error in self.client.stream_infer(requests()):
            if error is not None:
                raise error
            if result.get_response().outputs:
                texts.append(result.as_numpy("text_output").reshape(-1)[0].decode())
                first = first or time.perf_counter() - start
        return first * 1e3, len(texts) / (time.perf_counter() - start)


class OursAsync:
    """pipeline.client, asyncio."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.client = AsyncClient(url)
        loop.run_until_complete(self.client.model())

    def __call__(self) -> Sample:
        return self.loop.run_until_complete(self._once())

    async def _once(self) -> Sample:
        start = time.perf_counter()
        first, count = 0.0, 0
        async with self.client.stream("Hi", max_tokens=4096) as stream:
            async for chunk in stream:
                if chunk.text:
                    count += 1
                    first = first or time.perf_counter() - start
            seconds = time.perf_counter() - start
        return first * 1e3, count / seconds


def inputs(module: Any) -> list[Any]:
    """The same tensors as our client sends."""
    values = {
        "text_input": np.array([["Hi"]], dtype=object),
        "max_tokens": np.array([[4096]], dtype=np.int32),
        "stream": np.array([[True]]),
        "return_num_input_tokens": np.array([[True]]),
        "return_num_output_tokens": np.array([[True]]),
        "return_perf_metrics": np.array([[True]]),
    }
    types = {"text_input": "BYTES", "max_tokens": "INT32"}
    tensors = []
    for name, value in values.items():
        tensor = module.InferInput(name, value.shape, types.get(name, "BOOL"))
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with running(SERVER, arguments.tokens) as (port, _):
        url, loop = f"127.0.0.1:{port}", asyncio.new_event_loop()
        ways: dict[str, Callable[[], Sample]] = {
            "tritonclient, open stream": Bare(url, keep_stream=True),
            "tritonclient, new stream": Bare(url, keep_stream=False),
            "pipeline.client": Ours(url),
            "tritonclient aio": BareAsync(url, loop),
            "pipeline.client async": OursAsync(url, loop),
        }
        samples = in_turns(ways, lambda way: way(), arguments.rounds)
    result = figures(samples)
    print(json.dumps(result, indent=1) if arguments.json else table(result))


def figures(samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Medians of each way, and of the pairs of rounds."""
    rows = [
        {
            "way": name,
            "ttft_ms": statistics.median(sample[0] for sample in taken),
            "tokens_per_s": statistics.median(sample[1] for sample in taken),
        }
        for name, taken in samples.items()
    ]
    pairs = [
        {
            "ours": ours,
            "beside": bare,
            "times_tokens_per_s": paired(
                samples[ours], samples[bare], lambda mine, theirs: mine[1] / theirs[1]
            ),
            "later_ms": paired(samples[ours], samples[bare], lambda mine, theirs: mine[0] - theirs[0]),
        }
        for ours, bare in PAIRS
    ]
    return {"rows": rows, "pairs": pairs}


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    rows = [(row["way"], f"{row['ttft_ms']:.3f} ms", f"{row['tokens_per_s']:,.0f}") for row in result["rows"]]
    pairs = [
        (
            f"{pair['ours']} beside {pair['beside']}",
            f"{pair['later_ms']:+.3f} ms",
            f"{pair['times_tokens_per_s']:.2f} times",
        )
        for pair in result["pairs"]
    ]
    return markdown(("", "TTFT", "tokens/s"), (*rows, *pairs))


if __name__ == "__main__":
    main()
