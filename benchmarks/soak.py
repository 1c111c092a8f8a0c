"""Memory of each process of a deployment over many streams: it may rise at first, and must then stay.

    python benchmarks/soak.py [tiny-cpu] [--streams 50000] [--concurrency 16] [--cancel 0.3] [--allow-mib 2]

Builds the recipe if need be, starts a server of its own, and asks it for short answers. As with real clients hardly
two streams are alike: prompts of any length that fits, greedy or sampled, with stop words, with a form (where the
deployment has guided decoding). A share is cancelled by the client after the first text of a long answer; in its
middle, because a Triton of 2024 dies now and then of a stream that is cancelled just as it ends (server issue 8034).

Printed are, in MiB, the anonymous memory of each process (what it has allocated) and, after the plus, its share of what
several map (the regions through which Triton's processes pass tensors). Through the sum of both, in the second half of
the samples, a line is fitted by least squares. Exit code 1 says that one process grows by more than `--allow-mib` per
10,000 streams, or that a stream failed. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import string
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

from pipeline import progress
from pipeline.cli.serving import package_of
from pipeline.client import AsyncClient, Sampling
from pipeline.serving.server import TritonServer
from pipeline.store import Store
from pipeline.triton.deployment import Deployment

SAMPLES, LETTERS, LONGEST_ANSWER = 40, string.ascii_lowercase + "  ", 16
STUB = "triton_python_backend_stub"


class Memory(NamedTuple):
    """What one process holds, MiB."""

    anonymous: float
    shared: float

    @classmethod
    def of(cls, pid: int) -> Memory:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
        return cls(kib["Anonymous"] / 1024, kib["Pss_Shmem"] / 1024)


def server_processes() -> dict[str, int]:
    """Triton's processes below this one by name: the server, and the model of each Python stub."""
    found = {}
    for pid in _below(os.getpid()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        program = Path(command[0]).name
        if program == STUB:  # PROGRAM .../<model>/<version>/model.py ...
            found[Path(command[1]).parents[1].name] = pid
        elif program == "tritonserver":
            found[program] = pid
    return found


def _below(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _below(child)


class Streams:
    """Streams that are different each time, and the same in every run."""

    def __init__(self, client: AsyncClient, deployment: Deployment, *, guided: bool, cancel: float) -> None:
        self._client, self._guided, self._cancel = client, guided, cancel
        self._limits = deployment.limits
        self._random = random.Random(0)

    async def ask(self) -> None:
        chance = self._random
        # of letters at random a tokenizer makes nearly as many tokens, and never more
        prompt = "".join(chance.choices(LETTERS, k=chance.randint(1, self._limits.max_input_tokens - 8)))
        leaves = chance.random() < self._cancel
        longest = self._limits.max_output_tokens
        sampling: Sampling = {"max_tokens": chance.randint(1, LONGEST_ANSWER)}
        if leaves:
            sampling = {"max_tokens": longest, "min_tokens": longest}
        match chance.randrange(6):
            case 0:
                sampling |= {"temperature": 0.8, "top_p": 0.9, "seed": chance.randrange(1000)}
            case 1:
                sampling |= {"stop": ["".join(chance.choices(LETTERS, k=3))]}
            case 2 if self._guided:
                sampling |= {"guide_type": "regex", "guide": f"[a-z]{{{chance.randint(1, 200)},}}"}
        async with self._client.stream(prompt, **sampling) as stream:
            async for chunk in stream:
                if leaves and chunk.text:
                    break


async def soak(
    server: TritonServer, *, streams: int, concurrency: int, cancel: float, guided: bool
) -> dict[str, list[tuple[int, Memory]]]:
    """Run the streams; memory by process, after so many streams."""
    client = AsyncClient(server.grpc_url)
    asked = Streams(client, server.deployment, guided=guided, cancel=cancel)
    processes = server_processes()
    samples: dict[str, list[tuple[int, Memory]]] = {name: [] for name in processes}
    print("streams       s" + "".join(f"{name:>18}" for name in processes))
    began, every = time.monotonic(), max(1, streams // SAMPLES)
    numbers, done = iter(range(streams)), 0

    def take_sample() -> None:
        for name, pid in processes.items():
            samples[name].append((done, Memory.of(pid)))
        cells = (f"{taken[-1][1].anonymous:.1f} + {taken[-1][1].shared:.1f}" for taken in samples.values())
        print(
            f"{done:7}{time.monotonic() - began:8.0f}" + "".join(f"{cell:>18}" for cell in cells), flush=True
        )

    async def ask_one_after_the_other() -> None:
        nonlocal done
        for _ in numbers:
            await asked.ask()
            done += 1
            if done % every == 0:
                take_sample()

    take_sample()
    async with client, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(ask_one_after_the_other())
    return samples


def growth(samples: Sequence[tuple[int, Memory]]) -> float:
    """MiB per 10,000 streams in the second half."""
    second = samples[len(samples) // 2 :]
    return 10_000 * linear_regression([at for at, _ in second], [sum(memory) for _, memory in second]).slope


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="tiny-cpu")
    parser.add_argument("--streams", type=int, default=50_000)
    parser.add_argument("--concurrency", type=int, default=16, help="streams at a time")
    parser.add_argument("--cancel", type=float, default=0.3, help="share of streams that the client leaves")
    parser.add_argument("--allow-mib", type=float, default=2.0, help="growth per 10,000 streams")
    chosen = parser.parse_args()
    package = package_of(
        chosen.recipe, (), Store.at(None), build=True, offline=False, report=progress.for_stream()
    )
    config = package / "model_repository/tensorrt_llm/config.pbtxt"
    guided = config.is_file() and "guided_decoding_backend" in config.read_text()
    with TritonServer.of_package(package) as server:
        run = soak(
            server,
            streams=chosen.streams,
            concurrency=chosen.concurrency,
            cancel=chosen.cancel,
            guided=guided,
        )
        try:
            samples = asyncio.run(run)
        except ExceptionGroup as failed:
            sys.exit(f"a stream failed: {failed.exceptions[0]}; Triton's log is {server.log_file}")
    grown = {name: growth(taken) for name, taken in samples.items()}
    print("second half, MiB per 10,000 streams: " + ", ".join(f"{n} {mib:+.2f}" for n, mib in grown.items()))
    if too_much := [name for name, mib in grown.items() if mib > chosen.allow_mib]:
        sys.exit(f"grows by more than {chosen.allow_mib:g} MiB per 10,000 streams: {', '.join(too_much)}")


if __name__ == "__main__":
    main()
