"""Who runs trtllm-build: the protocol, and what a run leaves besides the files.

An executor runs one job and says what was printed. Whether the engine is right is judged from its files, by the
runtime, and in the same way for all executors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.executors.job import BuildJob
from pipeline.store import Json


@dataclass(frozen=True, slots=True)
class BuildLog:
    """A run that ended well."""

    executor: str  # "native", "docker", "adopted"
    command: tuple[str, ...]  # as in `BuildJob.shown`
    lines: tuple[str, ...]  # the last ones
    warnings: tuple[str, ...]  # each once, in order, without time and severity
    seconds: float
    peak_memory_mib: float | None  # of host memory, as the builder reports it for its largest rank
    host: str  # where it ran
    image: str | None = None  # of the container that it ran in
    image_digest: str | None = None  # "nvcr.io/…@sha256:…"
    gpu: str | None = None  # as its driver names it
    driver: str | None = None

    def facts(self) -> dict[str, Json]:
        """For the manifest of the engine."""
        found: dict[str, Json] = {
            "executor": self.executor,
            "command": list(self.command),
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
            "peak_memory_mib": self.peak_memory_mib,
            "host": self.host,
            "image": self.image,
            "image_digest": self.image_digest,
            "gpu": self.gpu,
            "driver": self.driver,
        }
        return {key: value for key, value in found.items() if value is not None}


class Executor(Protocol):
    """See `executor_of` for those that there are."""

    def check(self, version: str) -> None:
        """Before any work is done for it: whether this machine can run a job for that version of TensorRT-LLM.

        Raises:
            UserError: it cannot; the text says why, and what would do.
        """

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:
        """Have `job.output` filled.

        Raises:
            UserError: this machine cannot run it. StageError: the builder failed; the text has its last lines and the
            likely cause. BuiltElsewhere: the job is for another machine.
        """
