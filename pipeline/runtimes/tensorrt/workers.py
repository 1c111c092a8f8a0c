"""How many ranks of an engine are built at the same time: as many as the host's memory and the GPUs allow."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pipeline.machine.gpus import read_gpus, visible
from pipeline.runtimes.base import ExecutorChoice

# A worker reads the weights, TensorRT copies them, and the plan holds them again before it is written
# (data/build_errors.yaml, host_memory; TensorRT-LLM issues 102, 217, 489).
_COPIES = 3
_WORKER_BYTES = 6 * 2**30  # Python, CUDA, TensorRT and its kernels, whatever the model
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def workers(rank_bytes: Iterable[int], gpus: int, memory_bytes: int) -> int:
    """Ranks to build at a time; at least one, and then the builder tries with what there is.

    >>> workers([20 * 2**30] * 4, gpus=4, memory_bytes=140 * 2**30)
    2
    """
    sizes = list(rank_bytes)
    each = max(sizes) * _COPIES + _WORKER_BYTES
    return max(1, min(len(sizes), gpus, memory_bytes // each))


def offered(choice: ExecutorChoice, ranks: int, gpu_bytes: int) -> tuple[int, int]:
    """GPUs and bytes of host memory that a builder may use.

    Nothing is known of another machine, and its job must stay the same until its result comes back: it is taken to
    have a GPU a rank, and as much memory as these GPUs together.
    """
    if choice.name in ("print", "adopt"):
        return ranks, ranks * gpu_bytes
    seen = visible(read_gpus()[0], choice.devices, os.environ)
    return len(seen) or ranks, available_bytes()


def available_bytes() -> int:
    """Host memory that is free for a builder: the machine's, or what is left of a container's limit."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    machine = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    return machine if limit is None or used is None else min(machine, max(0, limit - used))


def _number(file: Path) -> int | None:
    """None: there is no such file, or it says "max"."""
    text = file.read_text(encoding="ascii").strip() if file.is_file() else "max"
    return None if text == "max" else int(text)
