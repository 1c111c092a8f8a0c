"""A commit of a repository onto the disk: small files first, so that what is wrong shows before gigabytes move.

Each file goes on where an earlier try or an earlier process stopped:

<partial>   grows; what a killed process left of it is kept, and only the rest is asked for (HTTP Range)
<target>    appears by a rename, with the right size and the right hash, or not at all
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from pipeline.errors import InvalidInput, SourceError
from pipeline.models.folder import CONFIG
from pipeline.plan.lint import lint_files, refuse_errors
from pipeline.progress import Progress, Task
from pipeline.reading import UnreadableFile
from pipeline.sources.checkpoint import HubCheckpoint
from pipeline.sources.hub import HubClient, RemoteFile
from pipeline.sources.hub_errors import BrokenTransfer, HubRetries, TransferStopped
from pipeline.sources.selection import select, shards
from pipeline.store import files, human_bytes

PARTIAL = ".partial"
# Where a repository has the graph that sentence-transformers and Optimum export, in 32 bits.
GRAPHS = ("onnx/model.onnx", "model.onnx")
_FILES_AT_ONCE = 4
# Requests for the header and the scales of a file, before it is downloaded.
_MOST_READS = 32
_BLOCK = 1 << 20
# A try that brings so many bytes was worth it, and the next ones are counted anew.
_PROGRESS_BYTES = 1 << 16


@dataclass
class Download:
    """The files of `source` on their way into a folder, which may hold what an earlier process got."""

    hub: HubClient
    source: HubCheckpoint
    into: Path
    progress: Progress
    allow_faults: bool = False  # whether errors of a quantized checkpoint's files are let pass
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> bool:
        """Bring all files that a build reads, and no others.

        Returns:
            Whether the weights are pickled.

        Raises:
            SourceError: It is not a checkpoint, a file cannot be had, the disk is too small, or a checkpoint that is
                quantized already is damaged.
        """
        source = self.source
        listed = self.hub.files(source.repo, source.commit, self.progress.say)
        selection = select(
            listed, allow_pickle=source.allow_pickle, label=source.label, adapter=source.adapter
        )
        (self.into / PARTIAL).mkdir(exist_ok=True)
        first = [*selection.companions, *([selection.weights] if selection.is_index else [])]
        self._get(first, listed)
        weights: tuple[str, ...] = (selection.weights,)
        if selection.is_index:
            index = (self.into / selection.weights).read_bytes()
            weights = shards(index, listed, pickled=selection.pickled, label=source.label)
        if not selection.pickled and not source.adapter:
            self._judge(listed)
        self._get(weights, listed)
        self._keep({*first, *weights})
        return selection.pickled

    def _judge(self, listed: Mapping[str, RemoteFile]) -> None:
        """Judge a checkpoint that is quantized already by its headers and scales, before its weights come."""
        try:
            findings = lint_files(_RemoteParts(self, listed), quantized_only=True)
        except (InvalidInput, UnreadableFile):
            return  # the settings; they are judged when all files are there
        refuse_errors(findings or (), self.source.label, self.progress.say, allowed=self.allow_faults)

    def run_graph(self) -> bool:
        """Bring the published ONNX graph, as model.onnx, with its configuration and tokenizer.

        Returns:
            Whether there is one; without, nothing is brought.

        Raises:
            SourceError: A file cannot be had or lacks, or the disk is too small.
        """
        source = self.source
        listed = self.hub.files(source.repo, source.commit, self.progress.say, recursive=True)
        graph = next((name for name in GRAPHS if name in listed), None)
        if graph is None:
            return False
        if f"{graph}_data" in listed:
            raise SourceError(
                f"{source.label}: {graph} keeps its weights in another file: take a smaller model"
            )
        wanted = (CONFIG, "tokenizer.json", graph)
        if lacking := [name for name in wanted if name not in listed]:
            raise SourceError(f"{source.label} has {graph}, but no {' and no '.join(lacking)}")
        (self.into / PARTIAL).mkdir(exist_ok=True)
        self._get(wanted, listed)
        self._keep({Path(name).name for name in wanted})
        return True

    def _keep(self, names: Collection[str]) -> None:
        """Remove what is not among the files that were wanted."""
        for path in self.into.iterdir():
            if path.name not in names:
                files.remove_tree(path) if path.is_dir() else path.unlink()

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
            present, whole = human_bytes(total - missing), human_bytes(total)
            self.progress.say(f"{self.source.label}: {present} of {whole} are here from an earlier try")
        with self.progress.task(f"download {self.source.repo}", missing, "B") as task:
            shared = _SharedTask(task)
            self._run_all([self._transfer(file, shared) for file in wanted])

    def _transfer(self, file: RemoteFile, task: Task) -> _Transfer:
        return _Transfer(
            hub=self.hub,
            repo=self.source.repo,
            commit=self.source.commit,
            file=file,
            partial=self.into / PARTIAL / Path(file.name).name,
            target=self.into / Path(file.name).name,
            say=self.progress.say,
            stopped=self._stopped,
            advance=task.advance,
        )

    def _present_bytes(self, file: RemoteFile) -> int:
        name = Path(file.name).name
        for path in (self.into / name, self.into / PARTIAL / name):
            if path.exists():
                return min(path.stat().st_size, file.bytes)
        return 0

    def _run_all(self, transfers: Iterable[_Transfer]) -> None:
        """Several at a time; the first failure stops the others, whose parts stay for the next time."""
        with ThreadPoolExecutor(max_workers=_FILES_AT_ONCE) as pool:
            running = [pool.submit(transfer.run) for transfer in transfers]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
        self._stopped.clear()
        failures = [
            error
            for future in running
            if not future.cancelled() and (error := future.exception()) is not None
        ]
        for error in sorted(failures, key=lambda error: isinstance(error, TransferStopped)):
            raise error


@dataclass
class _RemoteParts:
    """Files of a commit, read by ranges; those that are here already are read here."""

    download: Download
    listed: Mapping[str, RemoteFile]
    _reads: Counter[str] = field(default_factory=Counter)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: file.bytes for name, file in self.listed.items()}

    def part(self, name: str, begin: int, end: int) -> bytes:
        file = self.download.into / name
        if file.is_file():
            with file.open("rb") as stream:
                stream.seek(begin)
                return stream.read(end - begin)
        self._reads[name] += 1
        if self._reads[name] > _MOST_READS:
            return b""
        source = self.download.source
        return self.download.hub.part_of(
            source.repo, source.commit, name, (begin, end), self.download.progress.say
        )


class _SharedTask:
    """A task that several threads advance."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lock = threading.Lock()

    def advance(self, amount: float = 1) -> None:
        with self._lock:
            self._task.advance(amount)


@dataclass
class _Transfer:
    """One file of a download."""

    hub: HubClient
    repo: str
    commit: str
    file: RemoteFile
    partial: Path
    target: Path
    say: Callable[[str], None]
    stopped: threading.Event
    # Receives the bytes that arrive, negative where they are lost.
    advance: Callable[[float], None]
    # Of the bytes in the partial file; hashlib's type has no name.
    _digest: Any = field(init=False)

    def run(self) -> None:
        """Bring the file to `target`. SourceError if it cannot be had, or is not what the Hub lists."""
        if self.target.exists():
            return
        with self.partial.open("ab+") as out:
            resumed = self._take_up(out)
            self._fill(out)
            if self._digest.hexdigest() != self.file.hash and resumed:  # the part from before may be damaged
                self._lose(out)
                self._fill(out)
            if self._digest.hexdigest() != self.file.hash:
                self._lose(out)
                raise SourceError(
                    f"hf:{self.repo}: {self.file.name} arrives with the hash {self._digest.hexdigest()}, but the Hub "
                    f"lists {self.file.hash}; a proxy or mirror alters it, or the repository is damaged"
                )
            out.flush()
            os.fsync(out.fileno())
        self.partial.rename(self.target)

    def _take_up(self, out: BinaryIO) -> bool:
        """Hash what an earlier process left; whether there was anything."""
        self._digest = self._new_digest()
        if out.tell() > self.file.bytes:
            out.truncate(0)
        out.seek(0)
        while block := out.read(_BLOCK):
            self._digest.update(block)
        return out.tell() > 0

    def _fill(self, out: BinaryIO) -> None:
        retries = HubRetries(self.hub.subject(self.repo, self.commit), self.say, self.stopped)
        while (before := out.tell()) < self.file.bytes:
            try:
                self._receive(out)
            except (httpx.HTTPError, BrokenTransfer) as error:
                retries.wait(error, progressed=out.tell() - before >= _PROGRESS_BYTES)

    def _receive(self, out: BinaryIO) -> None:
        """One request for all that is lacking; it may break at any place."""
        start = out.tell()
        with self.hub.open(self.repo, self.commit, self.file.name, start) as response:
            if start and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                self._lose(out)  # the server does not resume: it sends the file from its beginning
                if response.status_code == 206:
                    raise BrokenTransfer(f"{self.file.name}: another part than was asked for")
            for block in response.iter_raw():  # as they come: nothing waits in a buffer when it breaks
                if self.stopped.is_set():
                    raise TransferStopped
                out.write(block)
                self._digest.update(block)
                self.advance(len(block))
                if out.tell() > self.file.bytes:
                    raise SourceError(
                        f"hf:{self.repo}: {self.file.name} is longer than the {self.file.bytes} bytes of the Hub's list"
                    )
        if out.tell() < self.file.bytes:
            raise BrokenTransfer(f"{self.file.name} ended after {out.tell()} of {self.file.bytes} bytes")

    def _lose(self, out: BinaryIO) -> None:
        self.advance(-out.tell())
        out.truncate(0)
        out.seek(0)
        self._digest = self._new_digest()

    def _new_digest(self) -> Any:
        if self.file.is_sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.file.bytes, usedforsecurity=False)
