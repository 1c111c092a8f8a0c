"""Artifacts in an object store: sent once, fetched by whoever serves them, and verified while they come.

    s3://bucket/folder   gs://bucket/folder   az://container/folder   https://host/folder   file:///folder

An artifact lies there under its own name: <address>/<stage>-<digest20>/manifest.json, and the files that it lists. The
manifest is sent last, so that what has one is whole. It must give the digest in its name, and each file the SHA-256 in
the manifest. Who names the artifact by its content (package-…@sha256:…, the SHA-256 of its manifest) gets that and no
other; who has a public key ($PIPELINE_VERIFY_KEY) gets what it signed. A fetched artifact appears by one rename.

A server of one's own that speaks S3 is named beside the bucket: s3://bucket/folder?endpoint=http://minio:9000.
Credentials are those of the environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_…, roles and
workload identities), as obstore 0.12 finds them, which does the transport, with retries. Nothing is ever removed there.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs

from pipeline.errors import DamagedArtifact, StoreError, UserError
from pipeline.extras import missing
from pipeline.progress import Progress, Silent
from pipeline.store import files, lock, manifest, signature
from pipeline.store.artifact import Artifact
from pipeline.store.manifest import FileEntry, Manifest
from pipeline.store.ranged_fetch import (
    STREAMS,
    BrokenOff,
    RangesUnsupported,
    WantedFile,
    fetch_files,
    pause,
)
from pipeline.store.signature import VerifyKeys

SCHEMES = ("s3", "gs", "az", "https", "http", "file")
# What a stream hands over at once.
_CHUNK = 4 << 20
_BY_CONTENT = re.compile(r"(?P<name>[^@]+)@sha256:(?P<digest>[0-9a-f]{64})")


def send_artifact(artifact: Artifact, address: str, progress: Progress | None = None) -> str:
    """Copy an artifact into an object store, where it is not there yet.

    Args:
        artifact: Artifact whose files are those of its manifest (`store.check`).

    Returns:
        Where it is: `<address>/<name>`.

    Raises:
        StoreError: It cannot be written.
        UserError: The address is invalid, or obstore is not installed.
    """
    remote, name = _Remote(address), artifact.name
    place = f"{remote.address}/{name}"
    with _naming(place, "written"):
        if (artifact.path / signature.FILE).is_file():
            # Also of what is there: it may have been signed since.
            remote.put(f"{name}/{signature.FILE}", artifact.path / signature.FILE)
        if remote.size(f"{name}/{manifest.FILE}") is not None:
            return place
        entries = artifact.manifest.files
        with (progress or Silent()).task(f"send {name}", artifact.manifest.total_bytes, "B") as task:

            def send(file: str) -> None:
                if remote.size(f"{name}/{file}") != entries[file].bytes:
                    remote.put(f"{name}/{file}", artifact.path / file)
                task.advance(entries[file].bytes)

            with ThreadPoolExecutor(STREAMS) as pool:
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
    keys: VerifyKeys | None = None,
) -> Artifact:
    """Copy an artifact from an object store, and verify every byte on the way.

    Args:
        name: Stage and beginning of the digest; with @sha256: and the SHA-256 of the manifest, no other content is
            taken.
        into: Folder that gets a folder of that name.
        only: Which files are wanted, by name and entry in the manifest.
        keys: By one of which it must be signed; None takes unsigned ones.

    Raises:
        DamagedArtifact: Files are not those that were published, named or signed; all that differ are named.
        StoreError: It cannot be read or written, or another process fetches it.
        UserError: It is not there, the address is invalid, or obstore is not installed.
    """
    named = _BY_CONTENT.fullmatch(name)
    name, content = (name, None) if named is None else (named["name"], named["digest"])
    target, part = into / name, into / f".{name}.part"
    if (target / manifest.FILE).is_file():
        if content is not None:
            _check_content(target, content)
        if keys is not None:
            keys.check_folder(target)
        return Artifact(target, Manifest.load(target))
    remote = _Remote(address)
    with _naming(f"{remote.address}/{name}", "read"):
        part.mkdir(parents=True, exist_ok=True)
        acquired = lock.exclusive(into / f".{name}.lock")
        if acquired is None:
            raise StoreError(f"{target}: is being fetched by {lock.holder(into / f'.{name}.lock')}")
        try:
            record = _fetch_manifest(remote, name, part, content, keys)
            wanted = [
                WantedFile(f"{name}/{file}", part / file, entry)
                for file, entry in record.files.items()
                if only(file, entry)
            ]
            total = sum(blob.entry.bytes for blob in wanted)
            with (progress or Silent()).task(f"fetch {name}", total, "B") as task:
                faults = fetch_files(remote, wanted, task.advance)
            if faults:
                listed = "\n".join(f"  {fault}" for fault in sorted(faults))
                raise DamagedArtifact(f"{remote.address}/{name}: damaged\n{listed}\nsend it again")
            files.make_read_only(part)
            files.settle(part)
            os.rename(part, target)
            files.fsync(into)
        finally:
            with suppress(OSError):
                # Nothing has come: an artifact that is not there leaves no folder.
                part.rmdir()
            acquired.release(unlink=True)
    return Artifact(target, record)


def _fetch_manifest(
    remote: _Remote, name: str, part: Path, content: str | None, keys: VerifyKeys | None
) -> Manifest:
    path = f"{name}/{manifest.FILE}"
    raw = remote.small(path, manifest.MAX_BYTES)
    if raw is None:
        raise UserError(f"{remote.address}: has no {path}; `pipeline store push` sends it there")
    signed = remote.small(f"{name}/{signature.FILE}", signature.MAX_BYTES)
    for file, data in ((manifest.FILE, raw), (signature.FILE, signed)):
        (part / file).unlink(missing_ok=True)
        if data is not None:
            (part / file).write_bytes(data)
    if keys is not None:
        keys.check(raw, signed, f"{remote.address}/{name}")
    if content is not None:
        _check_content(part, content)
    record = Manifest.load(part)
    if record.name != name or record.key.name != name or record.key.digest != record.digest:
        raise DamagedArtifact(f"{remote.address}/{path}: is that of {record.key.name}")
    strange = [file for file in record.files if not _is_inside(file)]
    if strange:
        raise DamagedArtifact(f"{remote.address}/{path}: names files elsewhere: {', '.join(strange)}")
    return record


def _check_content(folder: Path, digest: str) -> None:
    actual = content_digest(folder)
    if actual != digest:
        raise DamagedArtifact(
            f"{folder / manifest.FILE}: has the SHA-256 {actual}, and the artifact was named with {digest}"
        )


def content_digest(folder: Path) -> str:
    """Hash the manifest of an artifact, which has the SHA-256 of all files: 64 hexadecimal digits."""
    return hashlib.sha256((folder / manifest.FILE).read_bytes()).hexdigest()


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    own = (manifest.FILE, manifest.TWIN, signature.FILE)
    return not path.is_absolute() and ".." not in path.parts and file not in own


class _Remote:
    """A folder of an object store."""

    def __init__(self, address: str) -> None:
        """Open the object store. Raises UserError if the address is invalid, or obstore is not installed."""
        scheme = address.partition("://")[0]
        if "://" not in address or scheme not in SCHEMES:
            raise UserError(
                f"{address}: is not the address of an object store; write s3://bucket/folder, or gs, az, https, file"
            )
        try:
            import obstore
            import obstore.exceptions
            from obstore.store import from_url
        except ImportError as error:
            raise missing("an object store", error, "objects") from error
        self._api: Any = obstore
        base, _, query = address.partition("?")
        self.address, options = base.rstrip("/"), parse_qs(query)
        endpoint = options.pop("endpoint", [""])[-1]
        if options or (query and not endpoint) or (endpoint and scheme != "s3"):
            raise UserError(f"{address}: takes ?endpoint=http://HOST:PORT only, of s3://")
        if scheme == "file":
            Path(self.address.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
        plain = scheme == "http" or endpoint.startswith("http://")
        settings: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        settings |= {"client_options": {"allow_http": True}} if plain else {}
        try:
            self._store = from_url(self.address, **settings)
        except (ValueError, obstore.exceptions.BaseError) as error:
            raise UserError(f"{address}: {error}") from error

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            return int(self._api.head(self._store, path)["size"])
        except (FileNotFoundError, self._api.exceptions.NotFoundError):
            return None

    def stream(self, path: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes of a file, from `start` until `end`, as they come.

        Raises:
            RangesUnsupported: the server gives whole files only.
            BrokenOff: the transfer failed.
        """
        errors = self._api.exceptions
        options = None if end is None else {"range": (start, end)}
        try:
            for chunk in self._api.get(self._store, path, options=options).stream(min_chunk_size=_CHUNK):
                yield bytes(chunk)
        except errors.NotSupportedError as error:
            raise RangesUnsupported(str(error)) from error
        except (
            FileNotFoundError,
            errors.NotFoundError,
            errors.PermissionDeniedError,
            errors.UnauthenticatedError,
        ):
            raise
        except errors.BaseError as error:
            raise BrokenOff(str(error).strip().partition("\n")[0]) from error

    def small(self, path: str, most: int) -> bytes | None:
        """A whole file; None if there is none. Raises DamagedArtifact for one of more than `most` bytes."""
        size = self.size(path)
        if size is None:
            return None
        if size > most:
            raise DamagedArtifact(f"{self.address}/{path}: {size} bytes are more than it can have")
        failures = 0
        while True:
            try:
                return b"".join(self.stream(path))
            except BrokenOff:
                failures += 1
                pause(failures)

    def put(self, path: str, file: Path) -> None:
        """Write a file, in parts where it is large."""
        self._api.put(self._store, path, file)


@contextmanager
def _naming(place: str, action: str) -> Iterator[None]:
    """Errors of the transport and of the disk as ours."""
    try:
        yield
    except (StoreError, UserError):
        raise
    except Exception as error:
        if isinstance(error, OSError | BrokenOff) or type(error).__module__.startswith("obstore"):
            reason = str(error).strip().partition("\n")[0]
            raise StoreError(f"{place}: cannot be {action}: {reason}") from error
        raise
