"""Clients that leave just as their answer ends: what Triton makes of it.

    python benchmarks/departures.py [--streams 16] [--seconds 120] [--json]

Triton 24.10, which the cpu runtime brings, can end as a whole when a call is cancelled at the moment its answer ends.
Short answers are asked of `pipeline serve tiny-cpu --no-gateway`, and left some milliseconds after their second part:

    tritonclient   its asyncio client's `stream_infer`, and `cancel` of what that returns: gRPC cancels the call
    ours           the task that reads an `AsyncClient`'s stream is cancelled, as by the gateway when its client leaves
    ours, blocking a `Client`'s stream is cancelled from another thread

Exit code 1 says that Triton had to be started again under ours. Of tritonclient's the count is shown; what it does is
right, and ends newer servers no more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from benchmarks.common import markdown, serving
from pipeline.client import AsyncClient, Cancelled, Client, ClientError, Stream
from pipeline.store import Store
from pipeline.triton.running import RunningServer

NAME, TOKENS, LATEST_S = "tiny-cpu", 4, 0.008

# Asks with a prompt; calls back when the second part is there.
Ask = Callable[[str, Callable[[], None]], Awaitable[None]]


async def leave(ask: Ask, streams: int, seconds: float, seed: int) -> Counter[str]:
    """Ask on so many streams, and leave each answer up to `LATEST_S` after its second part.

    Returns:
        How many were `left`, had `ended` before, and `failed`.
    """
    until, count = time.monotonic() + seconds, Counter[str]()

    async def ask_and_leave(chance: random.Random) -> None:
        while time.monotonic() < until:
            prompt = "".join(chance.choices("abcdefgh ", k=chance.randrange(5, 30)))
            begun = asyncio.Event()
            task = asyncio.ensure_future(ask(prompt, begun.set))
            waits = asyncio.ensure_future(begun.wait())
            await asyncio.wait({task, waits}, return_when=asyncio.FIRST_COMPLETED)
            waits.cancel()
            await asyncio.sleep(chance.random() * LATEST_S)
            outcome = "ended" if task.done() else "left"
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                pass
            except (ClientError, InferenceServerException, grpc.RpcError):
                outcome = "failed"
                await asyncio.sleep(0.2)
            count[outcome] += 1

    async with asyncio.TaskGroup() as group:
        for at in range(streams):
            group.create_task(ask_and_leave(random.Random(f"{seed}/{at}")))
    return count


@contextlib.asynccontextmanager
async def ours(url: str) -> AsyncIterator[Ask]:
    async with AsyncClient(url) as client:

        async def ask(prompt: str, second: Callable[[], None]) -> None:
            async with client.stream(prompt, max_tokens=TOKENS, min_tokens=TOKENS) as stream:
                await anext(stream)
                await anext(stream)
                second()
                async for _ in stream:
                    pass

        yield ask


@contextlib.asynccontextmanager
async def blocking(url: str) -> AsyncIterator[Ask]:
    with Client(url) as client, ThreadPoolExecutor(64) as threads:

        async def ask(prompt: str, second: Callable[[], None]) -> None:
            stream = client.stream(prompt, max_tokens=TOKENS, min_tokens=TOKENS)
            reading = loop.run_in_executor(threads, read, stream, second)
            try:
                await asyncio.shield(reading)
            except asyncio.CancelledError:
                await loop.run_in_executor(threads, stream.cancel)
                with contextlib.suppress(Cancelled):
                    await reading
                raise

        def read(stream: Stream, second: Callable[[], None]) -> None:
            with stream:
                next(stream)
                next(stream)
                loop.call_soon_threadsafe(second)
                for _ in stream:
                    pass

        loop = asyncio.get_running_loop()
        yield ask


@contextlib.asynccontextmanager
async def tritonclient(url: str) -> AsyncIterator[Ask]:
    async with InferenceServerClient(url) as client:

        async def ask(prompt: str, second: Callable[[], None]) -> None:
            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {
                    "model_name": "tensorrt_llm_bls",
                    "inputs": [
                        tensor("text_input", "BYTES", np.array([[prompt]], object)),
                        *(tensor(name, "INT32", np.array([[TOKENS]], np.int32)) for name in LENGTHS),
                        tensor("stream", "BOOL", np.array([[True]])),
                    ],
                }

            answers = client.stream_infer(requests())
            parts = 0
            try:
                async for _, error in answers:
                    if error is not None:
                        raise error
                    parts += 1
                    if parts == 2:
                        second()
            finally:
                answers.cancel()

        yield ask


LENGTHS = ("max_tokens", "min_tokens")


def tensor(name: str, datatype: str, array: Any) -> InferInput:
    made = InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


WAYS = {"tritonclient": tritonclient, "ours": ours, "ours, blocking": blocking}


async def run(way: str, url: str, streams: int, seconds: float) -> Counter[str]:
    async with WAYS[way](url) as ask:
        return await leave(ask, streams, seconds, seed=1)


def restarts(store: Store) -> int:
    """How often Triton was started again so far."""
    record = RunningServer.read(store.running, NAME)
    return sum(record.restarts.values()) if record is not None else 0


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    head = ("", "answers left", "that had ended before", "failed", "Triton started again")
    rows = [
        (way, *(f"{found[name]:,}" for name in ("left", "ended", "failed", "restarts")))
        for way, found in result["ways"].items()
    ]
    what = f"{result['streams']} streams, {result['seconds']:g} s each; answers of {TOKENS} tokens"
    return f"{what}, left up to {1000 * LATEST_S:g} ms after the second part.\n\n{markdown(head, rows)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=120, help="of each way")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="departures-") as folder:
        store = Store.at(Path(folder) / "store")
        # So many failures would make the supervisor pause, and give up.
        patience = ("--set", "triton={max_restarts: 100000, restart_window_s: 1}")
        with serving((NAME, "--build", "--no-gateway", *patience), NAME, store, Path(folder)) as served:
            for way in WAYS:
                before = restarts(store)
                count = asyncio.run(run(way, served.record.grpc_url, options.streams, options.seconds))
                time.sleep(5)
                found[way] = {
                    **{name: count[name] for name in ("left", "ended", "failed")},
                    "restarts": restarts(store) - before,
                }
                print(f"  {way}: {found[way]}", file=sys.stderr)
    result = {"streams": options.streams, "seconds": options.seconds, "ways": found}
    print(json.dumps(result, indent=1) if options.json else table(result))
    return 1 if any(count["restarts"] for way, count in found.items() if way != "tritonclient") else 0


if __name__ == "__main__":
    sys.exit(main())
