"""How many ranks of an engine are built at the same time: as many as the host's memory and the GPUs allow."""

from __future__ import annotations

import os
from collections.abc import Iterable

from pipeline.contracts.rules import rule
from pipeline.machine.gpus import read_gpus, visible
from pipeline.machine.host import read_memory
from pipeline.runtimes.base import ExecutorChoice


def workers(rank_bytes: Iterable[int], gpus: int, memory_bytes: int) -> int:
    """Ranks to build at a time; at least one, and then the builder tries with what there is.

    >>> workers([20 * 2**30] * 4, gpus=4, memory_bytes=140 * 2**30)
    2
    """
    # A worker reads the weights, TensorRT copies them, and the plan holds them again before it is written. Besides
    # there are Python, CUDA, TensorRT and its kernels, whatever the model (TensorRT-LLM issues 102, 217, 489).
    sizes, facts = list(rank_bytes), rule("host.memory").facts
    each: int = max(sizes) * facts["copies"] + facts["worker_gib"] * 2**30
    return max(1, min(len(sizes), gpus, memory_bytes // each))


def offered(choice: ExecutorChoice, ranks: int, gpu_bytes: int) -> tuple[int, int]:
    """GPUs and bytes of host memory that a builder may use.

    Nothing is known of another machine, and its job must stay the same until its result comes back: it is taken to
    have a GPU a rank, and as much memory as these GPUs together.
    """
    if choice.name in ("print", "adopt"):
        return ranks, ranks * gpu_bytes
    seen = visible(read_gpus()[0], choice.devices, os.environ)
    return len(seen) or ranks, read_memory().available_bytes
