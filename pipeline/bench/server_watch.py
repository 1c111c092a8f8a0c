"""What the server says of itself while it is loaded: KV cache, queue, requests, read from its pages of metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pipeline.bench.result import ServerFigures
from pipeline.serving.live import DeploymentPages, LiveFigures, MetricsPage

_EVERY_S = 1.0
_QUEUE = "pipeline_request_queue_seconds"


@dataclass(slots=True)
class ServerWatch:
    """Reads the pages of a deployment from time to time.

    Attributes:
        model: Name of the recipe, which is the gateway's label `model`.
        triton_url: Triton's page of metrics; None where it is not known.
        gateway_url: Of the gateway, without a path; None if there is none.
    """

    model: str
    triton_url: str | None
    gateway_url: str | None
    _seen: list[LiveFigures] = field(default_factory=list)
    _queue_ms: float | None = None

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look every second inside the block; where there is no page, nothing is read."""
        self._seen.clear()
        self._queue_ms = None
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
            self._queue_ms = self._queued_ms(before.gateway, (await self._pages()).gateway)

    def figures(self) -> ServerFigures:
        """What was seen since the last block began."""
        used = [one.kv_used for one in self._seen if one.kv_used is not None]
        running = [one.running for one in self._seen if one.running is not None]
        waiting = [one.waiting for one in self._seen if one.waiting is not None]
        return ServerFigures(
            kv_used_mean=round(sum(used) / len(used), 4) if used else None,
            kv_used_max=round(max(used), 4) if used else None,
            waiting_max=max(waiting, default=None),
            running_mean=round(sum(running) / len(running), 2) if running else None,
            queue_mean_ms=self._queue_ms,
        )

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            self._seen.append(LiveFigures.read(self.model, await self._pages()))

    async def _pages(self) -> DeploymentPages:
        return await asyncio.to_thread(DeploymentPages.fetch, self.triton_url, self.gateway_url)

    def _queued_ms(self, before: MetricsPage | None, now: MetricsPage | None) -> float | None:
        """Mean time in the gateway's queue between two pages."""
        if now is None:
            return None

        def grown(name: str) -> float:
            then = 0.0 if before is None else before.total(name, model=self.model) or 0.0
            return (now.total(name, model=self.model) or 0.0) - then

        count = grown(f"{_QUEUE}_count")
        return round(grown(f"{_QUEUE}_sum") / count * 1e3, 3) if count > 0 else None
