"""A run of trtllm-build: its job, its executor, and its log.

The flags of a job say what the engine is; the paths depend on who looks at them, so they are put in last. The names of
the timing cache are relative, because trtllm-build copies them into the engine's config.json, and an engine must not
tell where it was built.

An executor runs one job and says what was printed. Whether the engine is right is judged from its files, by the
runtime, and in the same way for all executors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.progress import Progress
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
        facts: dict[str, Json] = {
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
        return {key: value for key, value in facts.items() if value is not None}


class BuiltElsewhere(Exception):
    """An engine is to be built on another machine: not a failure. `job` is what that machine has to run."""

    def __init__(self, job: BuildJob) -> None:
        self.job = job
        super().__init__(job.name)


class Executor(Protocol):
    """See `executor_of` for those that there are."""

    def check(self, version: str) -> None:
        """Check, before any work is done, that this machine can run a job for that version of TensorRT-LLM.

        Raises:
            UserError: It cannot; the text says why, and what would do.
        """

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:
        """Have `job.output` filled.

        Returns:
            The command, its output, and the time it took.

        Raises:
            UserError: This machine cannot run it.
            StageError: The builder failed; the text has its last lines and the likely cause.
            StoreError: The disk has no room for the engine.
            BuiltElsewhere: The job is for another machine.
        """


PROGRAM = "trtllm-build"
TIMING_CACHE = "timing.cache"  # in the working directory
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # what is said is then in the log at once, also before a kill


@dataclass(frozen=True, slots=True)
class BuildJob:
    """One engine: all its ranks.

    >>> job = BuildJob(
    ...     name="tiny-target", flags=("--max_batch_size", "8"), checkpoint=Path("/c"), output=Path("/o"),
    ...     timing_cache=Path("/t"), log=Path("/l"), workers=1, gpus=1, version="1.2.1", image="i", gpu="l4", sm=89,
    ... )
    >>> " ".join(job.command("/c", "/o")[:5])
    'trtllm-build --checkpoint_dir /c --output_dir /o'
    """

    name: str  # of the recipe and the role: "llama-3.1-8b-fp8-target"
    flags: tuple[str, ...]  # all but those with paths, and but --workers
    checkpoint: Path  # config.json and rank<N>.safetensors
    output: Path  # a folder for config.json and rank<N>.engine; need not be there yet
    timing_cache: Path  # kept between builds; need not be there yet
    log: Path  # file that keeps all the builder says
    workers: int  # ranks that are built at the same time, a GPU each
    gpus: int  # ranks of the engine
    version: str  # of TensorRT-LLM
    image: str  # the container that will serve the engine
    gpu: str  # as the recipe names it: "h100-sxm-80g"
    sm: int  # of that GPU: 90

    def command(self, checkpoint: Path | str, output: Path | str) -> tuple[str, ...]:
        """Return the command as its runner sees the paths, to be run where the timing cache lies."""
        return (
            PROGRAM,
            *("--checkpoint_dir", str(checkpoint)),
            *("--output_dir", str(output)),
            *("--input_timing_cache", TIMING_CACHE),
            *("--output_timing_cache", self.new_timing_cache),
            *("--workers", str(self.workers)),
            *self.flags,
        )

    @property
    def shown(self) -> tuple[str, ...]:
        """The command without paths of any machine, for facts and comparisons."""
        return self.command("CHECKPOINT", "ENGINE")

    @property
    def new_timing_cache(self) -> str:
        """Name of the cache that is written. A lone worker extends the cache rank by rank; several would read it while
        rank 0 writes."""
        return TIMING_CACHE if self.workers == 1 else f"new-{TIMING_CACHE}"


def timing_cache_file(caches: Path, version: str, gpu: str) -> Path:
    """Return where the store keeps the cache that builders of this version on this GPU share."""
    return caches / "timing" / f"{version}-{gpu}.cache"
