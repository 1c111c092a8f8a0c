"""Who runs trtllm-build: this machine, a container on it, or another machine.

executor_of(order.executor).run(BuildJob(…), order.progress)   # -> BuildLog, and the files in job.output
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import UserError
from pipeline.runtimes.tensorrt.executors.base import BuildLog, Executor
from pipeline.runtimes.tensorrt.executors.job import BuildJob, timing_cache_file

__all__ = ["BuildJob", "BuildLog", "Executor", "executor_of", "timing_cache_file"]


def executor_of(choice: str | Path) -> Executor:
    """`native`, `docker` or `print`; `auto` for the first of these that works here; a folder: what was built elsewhere.

    Raises:
        UserError: there is no such executor.
    """
    raise UserError(f"no executor {choice!r}")
