"""A commit of a repository onto the disk: small files first, so that what is wrong shows before gigabytes move."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.progress import Progress, Task
from pipeline.stages.fetch.failures import Stopped
from pipeline.stages.fetch.hub import Hub, RemoteFile
from pipeline.stages.fetch.resolved import HubCheckpoint
from pipeline.stages.fetch.selection import select, shards
from pipeline.stages.fetch.transfer import Transfer
from pipeline.store import files, human_bytes

PARTIAL = ".partial"
_AT_ONCE = 4  # files


@dataclass
class Download:
    """The files of `source` on their way into a folder, which may hold what an earlier process got."""

    hub: Hub
    source: HubCheckpoint
    into: Path
    progress: Progress
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> bool:
        """Get all files that are wanted, and nothing else. Whether the weights are pickled."""
        source = self.source
        listed = self.hub.files(source.repo, source.commit, self.progress.say)
        selection = select(listed, allow_pickle=source.allow_pickle, label=source.label)
        (self.into / PARTIAL).mkdir(exist_ok=True)
        first = [*selection.companions, *([selection.weights] if selection.is_index else [])]
        self._get(first, listed)
        weights: tuple[str, ...] = (selection.weights,)
        if selection.is_index:
            index = (self.into / selection.weights).read_bytes()
            weights = shards(index, listed, pickled=selection.pickled, label=source.label)
        self._get(weights, listed)
        for path in self.into.iterdir():
            if path.name not in {*first, *weights}:
                files.remove_tree(path) if path.is_dir() else path.unlink()
        return selection.pickled

    def _get(self, names: Iterable[str], listed: Mapping[str, RemoteFile]) -> None:
        wanted = [listed[name] for name in names]
        total = sum(file.bytes for file in wanted)
        missing = total - sum(self._present_bytes(file) for file in wanted)
        free = shutil.disk_usage(self.into).free
        if missing > free:
            raise SourceError(
                f"{self.source.label}: {human_bytes(missing)} are to be downloaded, {self.into.parent} has "
                f"{human_bytes(free)} free; make room (pipeline store gc, with the same --store) or "
                "set PIPELINE_STORE to a larger disk"
            )
        if missing < total:
            there, whole = human_bytes(total - missing), human_bytes(total)
            self.progress.say(f"{self.source.label}: {there} of {whole} are here from an earlier try")
        with self.progress.task(f"download {self.source.repo}", missing, "B") as task:
            shared = _Shared(task)
            self._run_all([self._transfer(file, shared) for file in wanted])

    def _transfer(self, file: RemoteFile, task: Task) -> Transfer:
        return Transfer(
            hub=self.hub,
            repo=self.source.repo,
            commit=self.source.commit,
            file=file,
            partial=self.into / PARTIAL / file.name,
            target=self.into / file.name,
            say=self.progress.say,
            stopped=self._stopped,
            advance=task.advance,
        )

    def _present_bytes(self, file: RemoteFile) -> int:
        for path in (self.into / file.name, self.into / PARTIAL / file.name):
            if path.exists():
                return min(path.stat().st_size, file.bytes)
        return 0

    def _run_all(self, transfers: Iterable[Transfer]) -> None:
        """Several at a time; the first failure stops the others, whose parts stay for the next time."""
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            running = [pool.submit(transfer.run) for transfer in transfers]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
        self._stopped.clear()
        failures = [
            error for one in running if not one.cancelled() and (error := one.exception()) is not None
        ]
        for error in sorted(failures, key=lambda error: isinstance(error, Stopped)):
            raise error


class _Shared:
    """A task that several threads advance."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lock = threading.Lock()

    def advance(self, amount: float = 1) -> None:
        with self._lock:
            self._task.advance(amount)
