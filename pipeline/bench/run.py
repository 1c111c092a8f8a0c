"""One benchmark from its settings to its result.

subject = find_subject("tiny-cpu", SubjectSettings())
result = run_bench(subject, LoadSettings(concurrency=(8,)), Silent())
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import resource
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pipeline import __version__
from pipeline.bench.conversations import BenchWorkload
from pipeline.bench.forecast import LoadForecaster
from pipeline.bench.load import LoadRecords, Period, run_load
from pipeline.bench.load_settings import Load, LoadSettings
from pipeline.bench.result import BenchResult, LevelResult, ServerFigures
from pipeline.bench.subject import Subject
from pipeline.bench.summary import summarize
from pipeline.bench.targets import BenchRequest
from pipeline.client import Sampling
from pipeline.machine.host import processor_name
from pipeline.progress import Progress
from pipeline.serving.live import DeploymentPages, LiveFigures, MetricsPage

_NARROWING = 3  # halvings between the last load that held and the first that did not
_LOOK_EVERY_S = 1.0
_QUEUE = "pipeline_request_queue_seconds"
# Counters of proposed and of accepted draft tokens: those of this gateway, or of vLLM.
_PIPELINE, _VLLM = "pipeline_draft_tokens_total", "vllm:spec_decode_num_{}_tokens_total"

# Called while a load is under way: the load, the records so far, seconds since it began.
Watcher = Callable[[Load, LoadRecords, float], None]


def run_bench(
    subject: Subject,
    settings: LoadSettings,
    progress: Progress,
    *,
    sweep_to: float | None = None,
    watch: Watcher | None = None,
    ended: Callable[[LevelResult], None] | None = None,
) -> BenchResult:
    """Put loads on a deployment, one after the other.

    The first Ctrl-C ends the load that is under way; what was measured is returned, and says so.

    Args:
        progress: Reporter of each load.
        sweep_to: Largest load of a sweep, which doubles the first load until the SLO breaks; None for no sweep.
        watch: Called several times a second.
        ended: Called with the figures of each load when it is over.

    Raises:
        ServerError: The server cannot be reached.
        InvalidInput: The file of prompts has faults, or lengths are more than the deployment takes.
    """
    workload = BenchWorkload(subject, settings)
    # Before an hour of load, so that a fault of it shows at once.
    forecaster = LoadForecaster.of(subject.recipe, subject.store)
    served = subject.model if subject.way == "gateway" else subject.name
    metrics = MetricsWatch(served, subject.triton_metrics, subject.gateway_url)
    longest = subject.default_answer or subject.max_answer
    sampling: Sampling = {"temperature": settings.temperature, "max_tokens": longest}
    period = Period(settings.period_s, settings.requests, settings.uncounted_s, settings.grace_s)
    target = subject.target(settings.timeout_s, chat=not settings.raw)
    levels: list[LevelResult] = []

    async def run() -> float | None:
        stop = asyncio.Event()

        async def measure(load: Load) -> LevelResult:
            seed = settings.seed + len(levels)
            with progress.task(str(load)):
                async with metrics.watching():
                    records = await run_load(
                        target,
                        load,
                        workload.conversations(load, seed),
                        period,
                        sampling=sampling,
                        seed=seed,
                        think_s=settings.think_s,
                        watch=None if watch is None else lambda records, now_s: watch(load, records, now_s),
                        stop=stop,
                    )
            if workload.token_counter is not None:
                records.count_tokens(workload.token_counter)
            level = summarize(records, subject.slo, metrics.figures())
            levels.append(level)
            if ended is not None:
                ended(level)
            if level.interrupted:
                raise _Interrupted
            return level

        async with target:
            await target.check(_first_request(settings, sampling))
            with _interrupts(stop), contextlib.suppress(_Interrupted):
                if sweep_to is not None:
                    return await find_limit(settings.loads[0], sweep_to, measure)
                for load in settings.loads:
                    await measure(load)
        return None

    with _many_files():
        broke_at = asyncio.run(run())
    if sweep_to is not None:
        levels.sort(key=lambda level: level.value)
    return BenchResult(
        name=subject.name,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        target=subject.described,
        machine=_machine(),
        workload=workload.described(),
        seed=settings.seed,
        slo={} if subject.slo is None else subject.slo.model_dump(exclude_none=True),
        forecast=forecaster.forecast(levels),
        levels=tuple(levels),
        warnings=tuple(workload.warnings(levels)),
        broke_at=broke_at,
    )


def _first_request(settings: LoadSettings, sampling: Sampling) -> BenchRequest:
    """Make a request that a server refuses if it would refuse all of the load."""
    least: Sampling = {**sampling, "max_tokens": 1}
    if settings.file is None:
        least["min_tokens"] = 1
    return BenchRequest("Hi" if settings.raw else [{"role": "user", "content": "Hi"}], least)


async def find_limit(
    first: Load, most: float, measure: Callable[[Load], Awaitable[LevelResult]]
) -> float | None:
    """Double a load until it misses the SLO, then halve the step between what held and what did not.

    Args:
        first: The smallest load.
        most: The largest that is tried.
        measure: Measures a load.

    Returns:
        The smallest load that missed the SLO; None if none did.
    """
    passed, failed, value = 0.0, None, first.value
    while failed is None:
        if not (await measure(Load(first.kind, value))).holds():
            failed = value
        elif (passed := value) >= most:
            return None
        value = min(2 * value, most)
    for _ in range(_NARROWING):
        middle = (passed + failed) / 2 if first.open else (passed + failed) // 2
        if not passed or middle in (passed, failed):
            break
        good = (await measure(Load(first.kind, middle))).holds()
        passed, failed = (middle, failed) if good else (passed, middle)
    return failed


class _Interrupted(Exception):
    """A load was ended by Ctrl-C, and no other follows."""


@contextlib.contextmanager
def _interrupts(stop: asyncio.Event) -> Iterator[None]:
    """Let the first Ctrl-C end the load that is under way, so that it is reported, and the second everything."""
    if threading.current_thread() is not threading.main_thread():
        # Signals are not for other threads.
        yield
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _many_files() -> Iterator[None]:
    """Let this process have as many connections open as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass(slots=True)
class MetricsWatch:
    """Reads the metrics pages of a deployment during a load.

    Attributes:
        model: Name that the gateway serves, which is its label `model`.
        triton_url: URL of Triton's page; None where it is not known.
        gateway_url: URL of the gateway, without a path; None if there is none.
    """

    model: str
    triton_url: str | None
    gateway_url: str | None
    _pages_read: list[LiveFigures] = field(default_factory=list)
    _queue_ms: float | None = None
    _acceptance: float | None = None

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Read the pages every second inside the block, if there are any."""
        self._pages_read.clear()
        self._queue_ms = self._acceptance = None
        if self.triton_url is None and self.gateway_url is None:
            yield
            return
        before = await self._pages()
        task = asyncio.create_task(self._look())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            if (now := (await self._pages()).gateway) is not None:
                self._compare(before.gateway, now)

    def figures(self) -> ServerFigures:
        """Figures since the last block began."""
        used = [page.kv_used for page in self._pages_read if page.kv_used is not None]
        running = [page.running for page in self._pages_read if page.running is not None]
        waiting = [page.waiting for page in self._pages_read if page.waiting is not None]
        return ServerFigures(
            kv_used_mean=round(sum(used) / len(used), 4) if used else None,
            kv_used_max=round(max(used), 4) if used else None,
            waiting_max=max(waiting, default=None),
            running_mean=round(sum(running) / len(running), 2) if running else None,
            queue_mean_ms=self._queue_ms,
            acceptance=self._acceptance,
        )

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._pages_read.append(LiveFigures.read(self.model, await self._pages()))

    async def _pages(self) -> DeploymentPages:
        return await asyncio.to_thread(DeploymentPages.fetch, self.triton_url, self.gateway_url)

    def _compare(self, before: MetricsPage | None, now: MetricsPage) -> None:
        """Read what the gateway counted between two pages."""

        def grown(name: str, **labels: str) -> float:
            then = 0.0 if before is None else before.total(name, **labels) or 0.0
            return (now.total(name, **labels) or 0.0) - then

        count = grown(f"{_QUEUE}_count", model=self.model)
        self._queue_ms = (
            round(grown(f"{_QUEUE}_sum", model=self.model) / count * 1e3, 3) if count > 0 else None
        )
        kinds = ("proposed", "accepted")
        pipeline = [grown(_PIPELINE, model=self.model, draft_token_type=kind) for kind in kinds]
        vllm = [grown(_VLLM.format(kind), model_name=self.model) for kind in ("draft", "accepted")]
        proposed, accepted = pipeline if pipeline[0] else vllm
        self._acceptance = round(accepted / proposed, 4) if proposed > 0 else None


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "pipeline": __version__,
        "processor": processor_name(),
        "processors": os.cpu_count(),
    }
