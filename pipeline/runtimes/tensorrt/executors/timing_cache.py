"""The timing cache between the store and a builder: TensorRT's measurements of kernels, which save most of a build.

Builders work on copies, and a new cache appears in the store by one rename, so any number of builders may share it;
the last one wins, and what it lacks of another's is measured again. A cache saves time and decides nothing, so no
build fails because of it: what cannot be read or kept is said. What upstream does with a cache that is broken is
in `pipeline/contracts/data/build_errors.yaml`.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.executors.job import TIMING_CACHE, BuildJob
from pipeline.store import files


@dataclass(slots=True)
class TimingCache:
    """That of one build."""

    job: BuildJob
    folder: Path  # where the builder runs
    progress: Progress
    lent: bool = False  # whether it started with the store's

    def lend(self) -> None:
        """Copy the store's cache, if there is one, to where the builder looks for it."""
        try:
            shutil.copyfile(self.job.timing_cache, self.folder / TIMING_CACHE)
        except FileNotFoundError:  # there is none yet, or another builder has just put it away
            self.lent = False
        except OSError as error:
            (self.folder / TIMING_CACHE).unlink(missing_ok=True)
            self._say("cannot be read", error)
        else:
            self.lent = True

    def take_back(self) -> None:
        """Publish what the builder wrote."""
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

    def drop(self) -> None:
        """Put the store's cache away, and what is left of the copies."""
        self.lent = False
        try:
            self.job.timing_cache.unlink(missing_ok=True)
        except OSError as error:
            self._say("cannot be removed", error)
        for name in (TIMING_CACHE, self.job.new_timing_cache):
            (self.folder / name).unlink(missing_ok=True)

    def _say(self, what: str, error: OSError) -> None:
        self.progress.say(f"    the timing cache {self.job.timing_cache} {what}: {error.strerror}")
