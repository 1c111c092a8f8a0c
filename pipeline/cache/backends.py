"""Opening a backend of the response cache by its address.

    /var/cache/answers.db, file:///var/cache/answers.db      one SQLite file on this machine

A shared server keeps the caches of several recipes apart by their `name`. Secrets are never part of an address.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.cache.backend import Backend, Capacity
from pipeline.cache.sealing import Codec

_FILES = ("file", "sqlite")


def open_backend(
    place: str | Path,
    capacity: Capacity | None = None,
    *,
    name: str = "pipeline",  # noqa: ARG001
    codec: Codec | None = None,
) -> Backend:
    """The backend at a place.

    Args:
        place: a file, or the URL of a file or a server.
        name: whose cache it is, of several on one server.
        codec: seals what is kept; as it is without.

    Raises:
        BackendDown: it cannot be used now; the text says why.
        ValueError: this is no address of a backend.
    """
    from pipeline.cache.sqlite import SqliteBackend

    return SqliteBackend(file_of(place), capacity, codec=codec)


def file_of(place: str | Path) -> Path:
    """The file that a path or the URL of a file names.

    >>> file_of("file:///var/a%20b.db").as_posix(), file_of("c.db").as_posix()
    ('/var/a b.db', 'c.db')
    """
    if isinstance(place, Path) or "://" not in place:
        return Path(place).expanduser()
    parts = urlsplit(place)
    if parts.scheme not in _FILES:
        raise ValueError(f"{parts.scheme}:// is no backend of the response cache")
    if parts.netloc:
        raise ValueError(f"{place}: a file is written with three slashes, as in file:///var/cache.db")
    return Path(unquote(parts.path))
