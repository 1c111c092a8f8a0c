"""Executors of trtllm-build: this machine, a container on it, or another machine.

executor_of(inputs.executor).run(BuildJob(…), inputs.progress)   # -> BuildLog, and the files in job.output
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.errors import UserError
from pipeline.progress import Progress
from pipeline.runtimes.base import ExecutorChoice
from pipeline.runtimes.tensorrt.executors.base import BuildJob, BuildLog, Executor, timing_cache_file
from pipeline.runtimes.tensorrt.executors.builder import NativeExecutor
from pipeline.runtimes.tensorrt.executors.docker import DockerExecutor
from pipeline.runtimes.tensorrt.executors.remote import AdoptExecutor, PrintExecutor

__all__ = ["BuildJob", "BuildLog", "Executor", "executor_of", "timing_cache_file"]


def executor_of(choice: ExecutorChoice) -> Executor:
    """Return the executor that was chosen."""
    match choice.name:
        case "auto":
            return _AutoExecutor(choice)
        case "native":
            return NativeExecutor(choice.deadline_s, choice.devices)
        case "docker":
            return DockerExecutor(choice.deadline_s, choice.devices)
        case "print" | "print-all":
            return PrintExecutor()
        case "adopt":
            assert choice.folder is not None, "there is nothing to adopt without a folder"
            return AdoptExecutor(choice.folder)


@dataclass(frozen=True, slots=True)
class _AutoExecutor:
    """`native` where trtllm-build of the version is on PATH, else `docker` where that works."""

    choice: ExecutorChoice

    def check(self, version: str) -> None:
        self._executor(version)

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:
        return self._executor(job.version).run(job, progress)

    def _executor(self, version: str) -> Executor:
        reasons = []
        for name in ("native", "docker"):
            executor = executor_of(replace(self.choice, name=name))
            try:
                executor.check(version)
            except UserError as error:
                reasons.append(f"  {name}: {error}")
            else:
                return executor
        problem = f"nothing here can run trtllm-build {version}; --executor print makes a script for a machine that can"
        raise UserError("\n".join([problem, *reasons]))
