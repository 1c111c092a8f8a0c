"""What our client costs beside bare tritonclient: tokens a second and time to the first token, in one run.

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
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio

from pipeline.client import AsyncClient, Client
from pipeline.client.testing import FakeServer, Reply

MODEL = "tensorrt_llm_bls"
Sample = tuple[float, float]  # TTFT in ms, tokens a second


def serve(tokens: int) -> None:
    """The other process: prints its address, ends with its standard input."""
    with FakeServer(Reply([f"token{index} " for index in range(tokens)])) as server:
        print(server.url, flush=True)
        sys.stdin.read()


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


def measure(ways: dict[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    for round_number in range(rounds + 2):
        for name, way in ways.items():
            sample = way()
            if round_number >= 2:  # the first two warm up
                samples[name].append(sample)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.tokens)
        return
    command = [sys.executable, __file__, "--serve", "--tokens", str(arguments.tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        loop = asyncio.new_event_loop()
        ways: dict[str, Callable[[], Sample]] = {
            "tritonclient, open stream": Bare(url, keep_stream=True),
            "tritonclient, new stream": Bare(url, keep_stream=False),
            "pipeline.client": Ours(url),
            "tritonclient aio": BareAsync(url, loop),
            "pipeline.client async": OursAsync(url, loop),
        }
        report(measure(ways, arguments.rounds), as_json=arguments.json)
        server.kill()


def report(samples: dict[str, list[Sample]], *, as_json: bool) -> None:
    medians = {
        name: (
            statistics.median(sample[0] for sample in taken),
            statistics.median(sample[1] for sample in taken),
        )
        for name, taken in samples.items()
    }
    pairs = (
        ("pipeline.client", "tritonclient, open stream"),
        ("pipeline.client", "tritonclient, new stream"),
        ("pipeline.client async", "tritonclient aio"),
    )
    if as_json:
        print(
            json.dumps(
                {name: {"ttft_ms": ttft, "tokens_per_s": rate} for name, (ttft, rate) in medians.items()}
            )
        )
        return
    for name, (ttft, rate) in medians.items():
        print(f"{name:<28} TTFT {ttft:6.3f} ms   {rate:8,.0f} tokens/s")
    for ours, bare in pairs:
        rounds = list(zip(samples[ours], samples[bare], strict=True))  # pairs that met the same load
        ratio = statistics.median(mine[1] / theirs[1] for mine, theirs in rounds)
        later = statistics.median(mine[0] - theirs[0] for mine, theirs in rounds)
        print(
            f"{ours} / {bare}: {ratio:.3f} x tokens/s, TTFT {later:+.3f} ms (medians of {len(rounds)} pairs)"
        )


if __name__ == "__main__":
    main()
