"""A run of trtllm-build on this machine, by itself or in a container: what `native` and `docker` share.

Space, log, working folder, timing cache, progress, and the account of a failure. Which command is run is up to the
executor.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.contracts.build_errors import BuildError, diagnose
from pipeline.contracts.build_log import LogReader
from pipeline.errors import StageError, StoreError
from pipeline.progress import Progress, Task
from pipeline.runtimes.tensorrt.executors.base import BuildLog
from pipeline.runtimes.tensorrt.executors.job import PROGRAM, BuildJob
from pipeline.runtimes.tensorrt.executors.process import Launch, held_log, run
from pipeline.runtimes.tensorrt.executors.timing_cache import TimingCache
from pipeline.store import files, human_bytes

_TAIL = 20  # lines that a failure shows
_KEPT = 4000  # lines that are searched for known errors
_ENGINE_TO_CHECKPOINT = 1.1  # an engine holds the weights and little else


@dataclass(slots=True)
class _Attempt:
    """What one process said."""

    reader: LogReader = field(default_factory=LogReader)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    seconds: float = 0.0

    @property
    def tail(self) -> tuple[str, ...]:
        return tuple(line for line in self.lines if line.strip())[-_TAIL:]


def build(
    job: BuildJob,
    progress: Progress,
    launch: Callable[[Path], Launch],
    *,
    executor: str,
    deadline_s: float | None,
) -> BuildLog:
    """Fill `job.output`. `launch`: from the working folder to what is started there.

    Raises:
        StageError: it failed, or took too long. StoreError: the disk is too full to begin.
    """
    check_space(job)
    with held_log(job.log) as log, _workplace(job) as folder:
        cache = TimingCache(job, folder, progress)
        cache.lend()
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
            if not (cache.lent and any(cause.drops_timing_cache for cause in causes)):
                raise failure(
                    f"{PROGRAM} for {job.name} failed (exit code {code})", attempt.tail, causes, job.log
                )
            progress.say("    the kept timing cache may be why; building again without it")
            cache.drop()
            files.remove_tree(job.output)
            job.output.mkdir()
        cache.take_back()
    return BuildLog(
        executor=executor,
        command=job.shown,
        lines=attempt.tail,
        warnings=tuple(attempt.reader.warnings),
        seconds=attempt.seconds,
        peak_memory_mib=attempt.reader.peak_memory_mib,
        host=platform.node(),
    )


def failure(what: str, tail: tuple[str, ...], causes: tuple[BuildError, ...], log: Path) -> StageError:
    """An error with the last lines and the likely causes."""
    last = [f"  | {line[:300]}" for line in tail]
    likely = [f"likely cause: {cause}" for cause in causes]
    return StageError("\n".join([what, *last, *likely, f"its log: {log}"]))


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
        said = attempt.reader.feed(line)
        if said is not None:
            progress.say(f"    {PROGRAM}: {said}")
        task.advance(attempt.reader.engines - before)

    return listen
