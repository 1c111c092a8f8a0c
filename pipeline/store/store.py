"""The store: artifacts by the digest of what made them, safe for two builders at once and for `kill -9`.

    <root>/artifacts/<stage>-<digest20>/   published: complete, on the disk, read-only
           work/<stage>-<digest20>/        being made, or left by a make that was killed
           locks/<stage>-<digest20>.lock   held exclusively by the maker, shared by users (see `lock`)
           handed_over/<name>.json         builds that go on on another machine (see `gc.AwaitedBuild`)
           reports/  running/  logs/  caches/  calibrations/  tuning/    kept for others; not looked into

An artifact appears by one rename after all its bytes are on the disk, so that it is there whole or not at
all. The store moves nothing between machines and knows no stage; `gc` decides what is no longer needed.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.errors import StoreError, UserError
from pipeline.progress import Progress, Silent, human_bytes
from pipeline.store import files, lock, manifest
from pipeline.store.artifact import Artifact, check, damaged, quick_check
from pipeline.store.hashes import FileHashes
from pipeline.store.key import ArtifactKey, Json
from pipeline.store.manifest import Manifest
from pipeline.store.publish import no_room, publish

Make = Callable[[Path], Mapping[str, Json]]

_VARIABLE, _USUAL = "PIPELINE_STORE", "~/.cache/pipeline/store"
_POLL_S = 0.2
_REMIND_S = 30.0


class Store:
    """A folder of artifacts that several processes may read, fill and clean at once.

    >>> store = Store.default()
    >>> artifact = store.obtain(key, make, recipe="tiny-cpu")     # doctest: +SKIP
    """

    def __init__(self, root: Path) -> None:
        """Open the store at `root`. Folders are made when the first artifact is.

        Args:
            root: folder of the store, which need not exist; "~" is not expanded here, but by `at`.
        """
        self.root = root
        self.artifacts = root / "artifacts"
        self.work = root / "work"
        self.locks = root / "locks"
        self.reports = root / "reports"
        self.running = root / "running"
        self.logs = root / "logs"
        self.caches = root / "caches"
        self.tuning = root / "tuning"
        self.calibrations = root / "calibrations"
        self.handed_over = root / "handed_over"
        self.hashes = FileHashes(root / "hashes.json")
        # Artifact name -> shared lock, until `close` or the end of the process.
        self._used: dict[str, lock.Lock] = {}
        self._guard = threading.Lock()

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    @classmethod
    def default(cls) -> Store:
        """Open the store at `$PIPELINE_STORE`, or at `~/.cache/pipeline/store`."""
        return cls.at(Path(os.environ.get(_VARIABLE) or _USUAL))

    @classmethod
    def at(cls, root: Path | None) -> Store:
        """Open the store at `root`, or the default store if it is None.

        Args:
            root: folder of the store, which need not exist; "~" is expanded. None: the one of `default`.
        """
        return cls.default() if root is None else cls(root.expanduser().absolute())

    @property
    def argv(self) -> tuple[str, ...]:
        """Options that name this store on a command line: empty for the store that is taken without options."""
        usual = not os.environ.get(_VARIABLE) and self.root == Path(_USUAL).expanduser()
        return () if usual else ("--store", str(self.root))

    def command(self, *arguments: str) -> str:
        """A `pipeline store` command for this store, to be shown to a person.

        >>> Store(Path("/disk/my store")).command("gc")
        "pipeline store gc --store '/disk/my store'"
        """
        return shlex.join(("pipeline", "store", *arguments, *self.argv))

    # reading

    def find(self, key: ArtifactKey) -> Artifact | None:
        """Look up the published artifact of a key, and put it into use (see `use`).

        Raises:
            DamagedArtifact: files are missing or of another size. StoreError: its manifest cannot be read.
        """
        artifact = self._published(key)
        return artifact if artifact is not None and self.use(artifact) else None

    def _published(self, key: ArtifactKey) -> Artifact | None:
        path = self.artifacts / key.name
        if not path.is_dir():
            return None
        artifact = Artifact(path, Manifest.load(path))
        if artifact.digest != key.digest:
            raise StoreError(f"{path}: holds {artifact.digest}, not {key.digest}: remove it and build again")
        result = quick_check(artifact)
        if not result.ok:
            raise damaged(artifact, result, self.command("verify", "--remove"))
        return artifact

    def check(self, artifact: Artifact, progress: Progress | None = None) -> None:
        """Make sure, before an artifact is used, that its files are those that were published.

        Raises:
            DamagedArtifact: with all that differ.
        """
        check(artifact, self.hashes, progress, command=self.command("verify", "--remove"))

    def list(self) -> tuple[Artifact, ...]:
        """List the artifacts that can be read, those used last first."""
        return tuple(sorted(self.scan()[0], key=_used_ns, reverse=True))

    def scan(self) -> tuple[tuple[Artifact, ...], dict[str, str]]:
        """Read all manifests.

        Returns:
            The artifacts that can be read, sorted by name; and directory name -> reason of those that cannot.
        """
        artifacts, damaged = [], {}
        paths = sorted(p for p in self.artifacts.glob("*") if p.is_dir())
        for path in paths:
            try:
                artifacts.append(Artifact(path, Manifest.load(path)))
            except StoreError as error:
                if path.is_dir():  # and not removed meanwhile
                    damaged[path.name] = str(error)
        return tuple(artifacts), damaged

    def get(self, name: str) -> Artifact:
        """Look an artifact up by its name, its digest, or the beginning of either if only one begins so.

        Args:
            name: such as "fetch-a0606687625223042420", or 64 hexadecimal digits, or the beginning of either.

        Raises:
            UserError: there is none, or several.
        """
        artifacts = self.scan()[0]
        for artifact in artifacts:
            if name in (artifact.name, artifact.digest):
                return artifact
        near = [a for a in artifacts if name and (a.name.startswith(name) or a.digest.startswith(name))]
        if len(near) == 1:
            return near[0]
        if near:
            raise UserError(f"{name!r} is short for {len(near)} artifacts: {', '.join(a.name for a in near)}")
        raise UserError(f"no artifact {name!r} in {self.root}; `{self.command('ls')}` shows what there is")

    def newest(self, stage: str, recipe: str) -> Artifact | None:
        """Return the artifact of a stage that a recipe obtained last, or None.

        Args:
            stage: name of the stage, such as "fetch".
            recipe: name of the recipe that its manifest holds: the recipe that asked for the artifact first.
        """
        fitting = (a for a in self.list() if (a.manifest.stage, a.manifest.recipe) == (stage, recipe))
        return next(fitting, None)

    # making

    def obtain(
        self,
        key: ArtifactKey,
        make: Make,
        *,
        recipe: str,
        progress: Progress | None = None,
        needs_bytes: int = 0,
    ) -> Artifact:
        """Return the published artifact of a key, or make and publish it.

        While another process makes the same artifact, this process waits and takes the result. The artifact is in use,
        and so kept by `gc`, until `close` or the end of this process.

        Args:
            make: gets an empty directory (or, if the key is resumable, what a killed `make` left), fills it, and
                returns the facts for the manifest. It must not write absolute paths: the directory is renamed.
            recipe: name of the recipe that asks, for the manifest.
            needs_bytes: free space to ask for before `make` begins.

        Raises:
            StoreError: there is no room, the store cannot be written, or what is there is damaged.
            StageError: `make` left what cannot be an artifact.
        """
        progress = progress or Silent()
        waiting_since, reminded = time.monotonic(), 0.0
        while True:
            published = self.find(key)
            if published is not None:
                return published
            acquired = self.take_lock(key.name)
            if acquired is not None:
                break
            now = time.monotonic()
            if not reminded or now - reminded >= _REMIND_S:
                holder = lock.holder(self._lock_path(key.name)) or "another process"
                since = f" for {now - waiting_since:.0f} s" if reminded else ""
                progress.say(f"{key.name}: waiting{since}: {holder} is making it")
                reminded = now
            time.sleep(_POLL_S)
        try:
            artifact = self._published(key) or self._make(key, make, recipe, progress, needs_bytes)
        finally:
            acquired.release()
        if not self.use(artifact):
            raise StoreError(
                f"{artifact.path}: removed as soon as made: `{self.command('gc')}` ran meanwhile"
            )
        return artifact

    def _make(
        self, key: ArtifactKey, make: Make, recipe: str, progress: Progress, needs_bytes: int
    ) -> Artifact:
        work = self.work / key.name
        try:
            if not key.resumable:
                files.remove_tree(work)
            inputs = (
                path for digest in key.inputs.values() for path in self.artifacts.glob(f"*-{digest[:20]}")
            )
            # What is made from an input that is its owner's alone is so, too.
            private = any(not path.stat().st_mode & stat.S_IROTH for path in inputs)
            work.mkdir(exist_ok=True, mode=0o700 if private else 0o777)
            for record in (manifest.FILE, manifest.TWIN):  # of a maker that was killed just before the rename
                (work / record).unlink(missing_ok=True)
            needed, room = needs_bytes - files.tree_bytes(work), shutil.disk_usage(self.root).free
            if needed > room:
                raise StoreError(
                    f"{key.name}: needs {human_bytes(needed)}, {self.root} has {human_bytes(room)} free; make room "
                    f"(`{self.command('gc')}`) or set {_VARIABLE} to a larger disk"
                )
            start = time.monotonic()
            facts = make(work)
            duration_s = time.monotonic() - start
            return publish(
                work, self.artifacts / key.name, key, recipe, facts, duration_s, progress, self.hashes
            )
        except BaseException as error:
            written = files.tree_bytes(work)
            free = human_bytes(shutil.disk_usage(self.root).free)
            if not key.resumable:
                files.remove_tree(work)
            if reason := no_room(error):
                why, fix = reason
                raise StoreError(
                    f"{key.name}: {why} in {self.root}: {human_bytes(written)} were written, {free} are free; "
                    + fix.format(gc=self.command("gc"))
                ) from error
            raise

    # use

    def use(self, artifact: Artifact) -> bool:
        """Keep `gc`, of any process, from removing an artifact until `close`.

        Returns:
            Whether it is still there.

        Raises:
            OSError: its lock cannot be opened, for another reason than that the store may only be read.
        """
        with self._guard:
            if artifact.name not in self._used:
                acquired = self._share(artifact.name)
                if acquired is None:  # a store that we may only read is collected by nobody
                    return artifact.path.is_dir()
                if not artifact.path.is_dir():
                    acquired.release()
                    return False
                self._used[artifact.name] = acquired
        if os.access(artifact.path, os.W_OK):
            os.utime(artifact.path)  # "used last" is the directory's time
        return True

    def descriptors(self) -> tuple[int, ...]:
        """Return the open locks of all that is in use, for the `pass_fds` of a child that goes on using it."""
        with self._guard:
            return tuple(acquired.fileno() for acquired in self._used.values())

    def close(self) -> None:
        """Put everything out of use."""
        with self._guard:
            for acquired in self._used.values():
                acquired.release()
            self._used.clear()

    # locks

    def _lock_path(self, name: str) -> Path:
        return self.locks / f"{name}.lock"

    def _share(self, name: str) -> lock.Lock | None:
        try:
            self.locks.mkdir(exist_ok=True)
            while (acquired := lock.shared(self._lock_path(name))) is None:
                time.sleep(_POLL_S)  # published, so its maker or a collector is about to let go
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            return None
        return acquired

    def take_lock(self, name: str) -> lock.Lock | None:
        """Lock the name of an artifact, to make or remove it; None while another process uses or makes it.

        Raises:
            StoreError: the store cannot be written.
        """
        try:
            for folder in (self.artifacts, self.work, self.locks, self.reports, self.running):
                folder.mkdir(parents=True, exist_ok=True)
            return lock.exclusive(self._lock_path(name))
        except OSError as error:
            raise StoreError(
                f"the store {self.root} cannot be written: {error.strerror}; "
                f"set {_VARIABLE} to a directory of your own"
            ) from error


def _used_ns(artifact: Artifact) -> int:
    try:
        return artifact.path.stat().st_mtime_ns
    except FileNotFoundError:  # removed meanwhile
        return 0
