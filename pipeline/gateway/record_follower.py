"""Keeps a model of the gateway where `pipeline serve` says that it runs: `<store>/running/<recipe>.json`.

The record names the package and the address. When either changes, because a package was exchanged or Triton was started
again, the model is loaded anew (tokenizer, template, limits, cache origin), and takes the place of the old one at once:
requests that have not been sent yet go to the new one, those under way end on the old one. While Triton is down to be
started again, requests wait in the gateway. Whatever goes wrong leaves the model as it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.gateway.served_model import ServedModel
from pipeline.triton.running import RunningServer

_log = logging.getLogger("pipeline.gateway")

_POLL_S = 0.2
_REREAD_S = 5.0
# State of a record whose Triton takes no requests -> reason given to requests that wait too long.
_NOT_YET = {
    "starting": "its server is being started",
    "restarting": "its server is being started again",
    "failing": "its server failed too often, and is tried again from time to time",
}
# An answer may be stored in the cache after the request that it was generated for has ended.
_CLOSE_AFTER_S = 1.0


class RecordFollower:
    """Follows the record of one recipe."""

    def __init__(
        self, name: str, folder: Path, current: RunningServer, load: Callable[[RunningServer], ServedModel]
    ) -> None:
        """
        Args:
            load: loads the model that a record names; called in a thread.
        """
        self.name = name
        self.fault: str | None = None  # why the model is not the one of the record
        self._folder, self._current, self._load = folder, current, load
        self._version: tuple[int, int] | None = None
        self._reread_at = 0.0
        self._record: RunningServer | None = current
        self._replaced: list[ServedModel] = []
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def replaced_requests(self) -> int:
        """Number of requests that are under way with models that were replaced."""
        return sum(model.holders for model in self._replaced)

    @property
    def restarts(self) -> Mapping[str, int]:
        """Component -> how often it was started again, as the record says."""
        return {} if self._record is None else self._record.restarts

    @property
    def metrics_url(self) -> str | None:
        """Triton's page of metrics, as the record says; None without a record."""
        return None if self._record is None else self._record.metrics_url

    async def run(self, models: MutableMapping[str, ServedModel]) -> None:
        """Follow the record until the task is cancelled; replaces the model in `models`, the gateway's by name."""
        while True:
            try:
                await self._look(models)
            except Exception:
                _log.exception("%s: its record cannot be followed", self.name)
            await asyncio.sleep(_POLL_S)

    async def aclose(self) -> None:
        """Close the models that were replaced."""
        for task in self._closing:
            task.cancel()
        for model in self._replaced:
            await model.aclose()

    async def _look(self, models: MutableMapping[str, ServedModel]) -> None:
        file = self._folder / f"{self.name}.json"
        try:
            stat = file.stat()
            version = (stat.st_mtime_ns, stat.st_ino)
        except OSError:
            version = None
        # Also without a change: after a failure, and because clocks of file systems are coarse.
        if version != self._version or time.monotonic() >= self._reread_at:
            self._version, self._reread_at = version, time.monotonic() + _REREAD_S
            try:
                self._record = await asyncio.to_thread(RunningServer.read, self._folder, self.name)
                if self._record is None:
                    self._fail(f"{file} is gone: nothing says any more where {self.name} is served")
                else:
                    await self._follow(self._record, models)
            except PipelineError as error:
                self._fail(str(error))
        record, why = self._record, ""
        if record is not None and record.state in _NOT_YET and record.alive:
            why = _NOT_YET[record.state]
        models[self.name].readiness.suspend(why)

    async def _follow(self, record: RunningServer, models: MutableMapping[str, ServedModel]) -> None:
        """Replace the model if the record names another package or address. Raises what loading it does."""
        changed = (record.deployment, record.target) != (self._current.deployment, self._current.target)
        if changed and record.state in ("ready", "unready"):
            model = await asyncio.to_thread(self._load, record)
            # So that the gateway stays ready.
            model.start()
            await model.readiness.probed()
            old, models[self.name] = models[self.name], model
            old.replace(model)
            self._current = record
            self._replaced.append(old)
            closing = asyncio.create_task(self._close(old))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            _log.info("%s: goes on with %s at %s", self.name, record.deployment.parent, record.target)
        if not changed or record.state in ("ready", "unready"):
            self.fault = None

    async def _close(self, model: ServedModel) -> None:
        await model.wait_unused()
        await asyncio.sleep(_CLOSE_AFTER_S)
        self._replaced.remove(model)
        await model.aclose()

    def _fail(self, text: str) -> None:
        if text != self.fault:
            _log.error("%s: goes on as it was: %s", self.name, text)
        self.fault = text
