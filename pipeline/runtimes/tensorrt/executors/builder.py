"""A run of trtllm-build on this machine: the executor `native`, and everything that it has in common with `docker`.

These are GPUs, space, log, working folder, timing cache, progress, and the report of a failure.

The timing cache holds TensorRT's measurements of kernels, which save most of a build. Builders work on copies, and a
new cache appears in the store by one rename, so any number of builders may share it; the last one wins, and what it
lacks of another's is measured again. No build fails because of it. What upstream does with a broken cache is in
`pipeline/contracts/data/build_errors.yaml`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.errors import StageError, StoreError, UserError
from pipeline.machine.gpus import read_gpus, visible
from pipeline.machine.programs import tensorrt_llm_of
from pipeline.progress import Progress, Task
from pipeline.runtimes.tensorrt.executors.base import (
    PROGRAM,
    TIMING_CACHE,
    UNBUFFERED,
    BuildJob,
    BuildLog,
)
from pipeline.runtimes.tensorrt.executors.build_log import BuildError, LogReader, diagnose
from pipeline.runtimes.tensorrt.executors.process import BuilderProcess, held_log, run
from pipeline.store import files, human_bytes

_TAIL = 20  # lines that a failure shows
_KEPT = 4000  # lines that are searched for known errors
_ENGINE_TO_CHECKPOINT = 1.1  # an engine holds the weights and little else


@dataclass(slots=True)
class _Attempt:
    """Output of one process."""

    reader: LogReader = field(default_factory=LogReader)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    seconds: float = 0.0

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(line for line in self.lines if line.strip())[-_TAIL:]


def build(
    job: BuildJob,
    progress: Progress,
    launch: Callable[[Path], BuilderProcess],
    *,
    executor: str,
    deadline_s: float | None,
) -> BuildLog:
    """Fill `job.output`. `launch`: from the working folder to what is started there.

    Raises:
        StageError: It failed, or took too long. StoreError: the disk is too full to begin.
    """
    check_space(job)
    with held_log(job.log) as log, _workplace(job) as folder:
        cache = TimingCache(job, folder, progress)
        cache.copy_in()
        progress.say(f"    {PROGRAM} for {job.name}; its log: {job.log}")
        while True:
            attempt = _Attempt()
            start = time.monotonic()
            with progress.task(PROGRAM, job.gpus, "engines") as task:
                code = run(
                    launch(folder),
                    log,
                    deadline_s=deadline_s,
                    on_line=_listener(attempt, progress, task),
                    tick=lambda: task.advance(0),
                )
            attempt.seconds = time.monotonic() - start
            if code == 0:
                break
            causes = diagnose(attempt.lines, code)
            if not (cache.is_copied and any(cause.drops_timing_cache for cause in causes)):
                raise failure(
                    f"{PROGRAM} for {job.name} failed (exit code {code})", attempt.tail, causes, job.log
                )
            progress.say("    the kept timing cache may be why; building again without it")
            cache.discard()
            files.remove_tree(job.output)
            job.output.mkdir()
        cache.publish()
    return BuildLog(
        executor=executor,
        command=job.shown,
        lines=attempt.tail,
        warnings=tuple(attempt.reader.warnings),
        seconds=attempt.seconds,
        peak_memory_mib=attempt.reader.peak_memory_mib,
        host=platform.node(),
    )


def failure(problem: str, tail: tuple[str, ...], causes: tuple[BuildError, ...], log: Path) -> StageError:
    """An error with the last lines and the likely causes."""
    last = [f"  | {line[:300]}" for line in tail]
    likely = [f"likely cause: {cause}" for cause in causes]
    return StageError("\n".join([problem, *last, *likely, f"its log: {log}"]))


def check_space(job: BuildJob) -> None:
    """Raises StoreError: the engine will not fit beside what is there."""
    needed = int(files.tree_bytes(job.checkpoint) * _ENGINE_TO_CHECKPOINT)
    free = shutil.disk_usage(job.output.parent).free
    if needed > free:
        raise StoreError(
            f"the engine of {job.name} needs about {human_bytes(needed)}, {job.output.parent} has {human_bytes(free)} "
            "free; make room (pipeline store gc, with the same --store) or set PIPELINE_STORE to a larger disk"
        )


@contextlib.contextmanager
def _workplace(job: BuildJob) -> Iterator[Path]:
    """An empty output, and an empty folder beside it to run in."""
    folder = job.output.with_name(f".{job.output.name}-building")
    for path in (job.output, folder):  # of a builder that was killed with its parent and ended late
        files.remove_tree(path)
        path.mkdir()
    try:
        yield folder
    finally:
        files.remove_tree(folder)


def _listener(attempt: _Attempt, progress: Progress, task: Task) -> Callable[[str], None]:
    def listen(line: str) -> None:
        attempt.lines.append(line)
        before = attempt.reader.engines
        progress_text = attempt.reader.feed(line)
        if progress_text is not None:
            progress.say(f"    {PROGRAM}: {progress_text}")
        task.advance(attempt.reader.engines - before)

    return listen


@dataclass(slots=True)
class TimingCache:
    """The timing cache of one build."""

    job: BuildJob
    folder: Path  # where the builder runs
    progress: Progress
    is_copied: bool = False  # whether it started with the store's

    def copy_in(self) -> None:
        """Copy the store's cache, if there is one, to where the builder looks for it."""
        try:
            shutil.copyfile(self.job.timing_cache, self.folder / TIMING_CACHE)
        except FileNotFoundError:  # there is none yet, or another builder has just put it away
            self.is_copied = False
        except OSError as error:
            (self.folder / TIMING_CACHE).unlink(missing_ok=True)
            self._say("cannot be read", error)
        else:
            self.is_copied = True

    def publish(self) -> None:
        """Put what the builder wrote into the store."""
        written = self.folder / self.job.new_timing_cache
        if not written.is_file() or not written.stat().st_size:
            return
        kept = self.job.timing_cache
        beside = kept.with_name(f".{kept.name}-{secrets.token_hex(4)}")
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(written, beside)
                files.fsync(beside)
                os.replace(beside, kept)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            self._say("cannot be kept", error)

    def discard(self) -> None:
        """Remove the store's cache, and what is left of the copies."""
        self.is_copied = False
        try:
            self.job.timing_cache.unlink(missing_ok=True)
        except OSError as error:
            self._say("cannot be removed", error)
        for name in (TIMING_CACHE, self.job.new_timing_cache):
            (self.folder / name).unlink(missing_ok=True)

    def _say(self, problem: str, error: OSError) -> None:
        self.progress.say(f"    the timing cache {self.job.timing_cache} {problem}: {error.strerror}")


@dataclass(frozen=True, slots=True)
class BuildGpu:
    """GPU that built an engine, as the driver names it. None: the driver was not asked."""

    name: str | None
    driver: str | None


def check_gpus(job: BuildJob, devices: tuple[int, ...]) -> BuildGpu:
    """A driver that does not answer is no error here: the builder itself will fail.

    Raises:
        UserError: There are GPUs, but of another kind, or too few.
    """
    all_gpus, problem = read_gpus()
    if problem:
        return BuildGpu(None, None)
    gpus = visible(all_gpus, devices, os.environ)
    if len(gpus) < job.workers:
        raise UserError(
            f"{job.name}: {job.workers} ranks are built at a time, a GPU each; this machine shows {len(gpus)} "
            f"of its {len(all_gpus)} GPUs"
        )
    used = gpus[: job.workers]
    for gpu in used:
        if gpu.sm != job.sm:
            raise UserError(
                f"{job.name} is for {job.gpu} (SM {job.sm}), GPU {gpu.index} here is {gpu.name} (SM {gpu.sm}), and an "
                "engine runs only on the kind of GPU that built it: build on the right machine (--executor print makes "
                "a script for it), or change runtime.gpu"
            )
    return BuildGpu(used[0].name, used[0].driver)


@dataclass(frozen=True, slots=True)
class NativeExecutor:
    """See `Executor`: trtllm-build on PATH, in a container of NVIDIA's or where TensorRT-LLM is installed."""

    deadline_s: float | None = None
    devices: tuple[int, ...] = ()  # GPUs that may be used; empty: those that are visible

    def check(self, version: str) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            raise UserError(
                f"there is no {PROGRAM} on PATH: install TensorRT-LLM {version}, or build with --executor docker, or "
                "with --executor print on another machine"
            )
        installed = tensorrt_llm_of(Path(program))
        if installed is not None and installed != version:
            raise UserError(
                f"{program} is of TensorRT-LLM {installed}, the recipe's runtime.version is {version}: install that, "
                "change the recipe, or build with --executor docker"
            )

    def run(self, job: BuildJob, progress: Progress) -> BuildLog:
        self.check(job.version)
        gpu = check_gpus(job, self.devices)
        # nvidia-smi counts in the order of the bus, CUDA by itself from the fastest on.
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | dict(os.environ) | UNBUFFERED
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
        program, *arguments = job.command(job.checkpoint, job.output)
        program = shutil.which(program) or program

        def launch(folder: Path) -> BuilderProcess:
            return BuilderProcess((program, *arguments), folder, environment)

        log = build(job, progress, launch, executor="native", deadline_s=self.deadline_s)
        return replace(log, gpu=gpu.name, driver=gpu.driver)
