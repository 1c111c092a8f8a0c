"""Jobs for builders, over a checkpoint that is only bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.runtimes.tensorrt.executors import BuildJob, timing_cache_file


def job_in(folder: Path, **changes: Any) -> BuildJob:
    """As the runtime would compose it in a store at `folder`."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "rank0.safetensors").write_bytes(b"weights")
    output = folder / "work" / "build-0123456789abcdef0123" / "engine"
    output.parent.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "name": "tiny-target",
        "flags": ("--max_batch_size", "8"),
        "checkpoint": checkpoint,
        "output": output,
        "timing_cache": timing_cache_file(folder / "caches", "1.2.1", "l4-24g"),
        "log": folder / "reports" / "tiny-target.log",
        "workers": 1,
        "gpus": 1,
        "version": "1.2.1",
        "image": "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3",
        "gpu": "l4-24g",
        "sm": 89,
    }
    return BuildJob(**values | changes)
