"""Artifacts in an object store: sent once, fetched by whoever serves them, and verified while they come.

    s3://bucket/folder   gs://bucket/folder   az://container/folder   https://host/folder   file:///folder

An artifact lies there under its own name: <address>/<stage>-<digest20>/manifest.json, and the files that it lists. The
manifest is sent last, so that what has one is whole. It must give the digest in its name, and each file the SHA-256 in
the manifest: hashed as the bytes arrive, so that nothing is read twice. A fetched artifact appears by one rename; a
fetch that was killed goes on where it was, file by file.

Credentials are those of the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_…, roles and
workload identities), as obstore 0.12 finds them, which does the transport, with retries. Nothing is ever removed there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import DamagedArtifact, StoreError, UserError
from pipeline.extras import missing
from pipeline.progress import Progress, Silent, Task
from pipeline.store import files, lock, manifest
from pipeline.store.artifact import Artifact
from pipeline.store.manifest import FileEntry, Manifest

SCHEMES = ("s3", "gs", "az", "https", "http", "file")
_CHUNK = 8 << 20
_STREAMS = 4


def send_artifact(artifact: Artifact, address: str, progress: Progress | None = None) -> str:
    """Copy an artifact into an object store, where it is not there yet.

    Args:
        artifact: Whose files are those of its manifest (`store.check`).
        address: Of the folder below which artifacts lie.
        progress: Is told the bytes.

    Returns:
        Where it is: `<address>/<name>`.

    Raises:
        StoreError: It cannot be written.
        UserError: The address is none, or obstore is not installed.
    """
    remote, name = _Remote(address), artifact.name
    place = f"{address.rstrip('/')}/{name}"
    with _naming(place, "written"):
        if remote.size(f"{name}/{manifest.FILE}") is not None:
            return place
        entries = artifact.manifest.files
        with (progress or Silent()).task(f"send {name}", artifact.manifest.total_bytes, "B") as task:

            def send(file: str) -> None:
                if remote.size(f"{name}/{file}") != entries[file].bytes:
                    remote.put(f"{name}/{file}", artifact.path / file)
                task.advance(entries[file].bytes)

            with ThreadPoolExecutor(_STREAMS) as pool:
                list(pool.map(send, entries))
        for file in (manifest.TWIN, manifest.FILE):
            remote.put(f"{name}/{file}", artifact.path / file)
    return place


def fetch_artifact(
    name: str,
    address: str,
    into: Path,
    progress: Progress | None = None,
    *,
    only: Callable[[str, FileEntry], bool] = lambda *_: True,
) -> Artifact:
    """Copy an artifact from an object store, and verify every byte on the way.

    Args:
        name: Of the artifact: stage, and beginning of its digest.
        address: Of the folder below which artifacts lie.
        into: Folder that gets a folder of that name.
        progress: Is told the bytes.
        only: Which files are wanted, by name and entry in the manifest.

    Raises:
        DamagedArtifact: What lies there is not what was published; all files that differ.
        StoreError: It cannot be read or written, or another process fetches it.
        UserError: It is not there, the address is none, or obstore is not installed.
    """
    target, part = into / name, into / f".{name}.part"
    if (target / manifest.FILE).is_file():
        return Artifact(target, Manifest.load(target))
    remote = _Remote(address)
    with _naming(f"{address.rstrip('/')}/{name}", "read"):
        part.mkdir(parents=True, exist_ok=True)
        held = lock.exclusive(into / f".{name}.lock")
        if held is None:
            raise StoreError(f"{target}: is being fetched by {lock.holder(into / f'.{name}.lock')}")
        try:
            record = _fetch_manifest(remote, name, part)
            wanted = {file: entry for file, entry in record.files.items() if only(file, entry)}
            total = sum(entry.bytes for entry in wanted.values())
            with (
                (progress or Silent()).task(f"fetch {name}", total, "B") as task,
                ThreadPoolExecutor(_STREAMS) as pool,
            ):

                def fetch(file: str) -> str:
                    return _fetch_file(remote, f"{name}/{file}", part / file, wanted[file], task)

                faults = [fault for fault in pool.map(fetch, wanted) if fault]
            if faults:
                listed = "\n".join(f"  {fault}" for fault in faults)
                raise DamagedArtifact(f"{address.rstrip('/')}/{name}: damaged\n{listed}\nsend it again")
            files.make_read_only(part)
            files.settle(part)
            os.rename(part, target)
            files.fsync(into)
        finally:
            held.release(unlink=True)
    return Artifact(target, record)


def _fetch_manifest(remote: _Remote, name: str, part: Path) -> Manifest:
    path = f"{name}/{manifest.FILE}"
    size = remote.size(path)
    if size is None:
        raise UserError(f"{remote.address}: has no {path}; `pipeline store push` sends it there")
    if size > manifest.MAX_BYTES:
        raise DamagedArtifact(f"{remote.address}/{path}: {size} bytes are no manifest")
    (part / manifest.FILE).unlink(missing_ok=True)
    (part / manifest.FILE).write_bytes(b"".join(remote.stream(path)))
    record = Manifest.load(part)
    if record.name != name or record.key.name != name or record.key.digest != record.digest:
        raise DamagedArtifact(f"{remote.address}/{path}: is that of {record.key.name}")
    strange = [file for file in record.files if not _is_inside(file)]
    if strange:
        raise DamagedArtifact(f"{remote.address}/{path}: names files elsewhere: {', '.join(strange)}")
    return record


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and file not in (manifest.FILE, manifest.TWIN)


def _fetch_file(remote: _Remote, path: str, target: Path, entry: FileEntry, task: Task) -> str:
    """Fetch one file, unless it is there. Returns what is wrong with it."""
    if target.is_file() and target.stat().st_size == entry.bytes:
        # It got its name when it had been verified.
        task.advance(entry.bytes)
        return ""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft, digest, count = target.with_name(f".{target.name}.draft"), hashlib.sha256(), 0
    if remote.size(path) is None:
        return f"{path}: is missing"
    with draft.open("wb") as file:
        for chunk in remote.stream(path):
            count += len(chunk)
            if count > entry.bytes:
                break
            digest.update(chunk)
            file.write(chunk)
            task.advance(len(chunk))
    if count != entry.bytes or digest.hexdigest() != entry.sha256:
        draft.unlink()
        return f"{path}: has not the {entry.bytes} bytes with the SHA-256 {entry.sha256}"
    draft.rename(target)
    return ""


class _Remote:
    """A folder of an object store."""

    def __init__(self, address: str) -> None:
        """Raises UserError: the address is none, or obstore is not installed."""
        scheme = address.partition("://")[0]
        if "://" not in address or scheme not in SCHEMES:
            raise UserError(
                f"{address}: is no address of an object store; write s3://bucket/folder, or gs, az, https, file"
            )
        try:
            import obstore
            import obstore.exceptions
            from obstore.store import from_url
        except ImportError as error:
            raise missing("an object store", error, "objects") from error
        self.address = address.rstrip("/")
        self._api: Any = obstore
        if scheme == "file":
            Path(address.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
        try:
            self._store = from_url(
                self.address, client_options={"allow_http": True} if scheme == "http" else None
            )
        except (ValueError, obstore.exceptions.BaseError) as error:
            raise UserError(f"{address}: {error}") from error

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            return int(self._api.head(self._store, path)["size"])
        except (FileNotFoundError, self._api.exceptions.NotFoundError):
            return None

    def stream(self, path: str) -> Iterator[bytes]:
        """The bytes of a file, as they come."""
        for chunk in self._api.get(self._store, path).stream(min_chunk_size=_CHUNK):
            yield bytes(chunk)

    def put(self, path: str, file: Path) -> None:
        """Write a file, in parts where it is large."""
        self._api.put(self._store, path, file)


@contextmanager
def _naming(place: str, what: str) -> Iterator[None]:
    """Errors of the transport and of the disk as ours."""
    try:
        yield
    except (StoreError, UserError):
        raise
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith("obstore"):
            reason = str(error).strip().partition("\n")[0]
            raise StoreError(f"{place}: cannot be {what}: {reason}") from error
        raise
