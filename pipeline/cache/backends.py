"""Opening a backend of the response cache by its address.

    /var/cache/answers.db, file:///var/cache/answers.db      one SQLite file on this machine
    memory://                                                this process only
    redis://host:6379/0, valkey://…, rediss:// for TLS       Redis or Valkey
    postgresql://user@host:5432/database                     PostgreSQL with pgvector

A shared server keeps the caches of several recipes apart by their `name`. A password is never part of an address: it is
taken from the environment variable PIPELINE_CACHE_PASSWORD.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.cache.backend import Backend, Capacity
from pipeline.cache.encryption import Codec
from pipeline.cache.postgres import SCHEMES as POSTGRES
from pipeline.cache.redis_server import SCHEMES as REDIS

FILES = ("file", "sqlite")
MEMORY = "memory"


def open_backend(
    place: str | Path,
    capacity: Capacity | None = None,
    *,
    name: str = "pipeline",
    codec: Codec | None = None,
) -> Backend:
    """Open the backend at a place. A server is not contacted yet: one that is down makes misses, and may come back.

    Args:
        place: a file, or the URL of a file or a server.
        capacity: None: the defaults of `Capacity`.
        name: distinguishes several caches on one server.
        codec: encrypts entries; None: they are kept in the clear.

    Raises:
        BackendDown: the file cannot be used; the text says why.
        ValueError: the address is not that of a backend, or the distribution that it needs is missing.
    """
    scheme = _scheme(place)
    if scheme in REDIS:
        from pipeline.cache.redis_backend import RedisBackend
        from pipeline.cache.redis_server import RedisAddress

        return RedisBackend(RedisAddress.parse(str(place)), capacity, name=name, codec=codec)
    if scheme in POSTGRES:
        from pipeline.cache.pgvector import PgvectorBackend

        return PgvectorBackend(str(place), capacity, name=name, codec=codec)
    from pipeline.cache.sqlite import SqliteBackend

    return SqliteBackend(None if scheme == MEMORY else file_of(place), capacity, codec=codec)


def is_file(place: str | Path) -> bool:
    """Whether a place is a file, not a server."""
    return _scheme(place) in ("", *FILES)


def file_of(place: str | Path) -> Path:
    """Return the file that a path or the URL of a file names.

    >>> file_of("file:///var/a%20b.db").as_posix(), file_of("c.db").as_posix()
    ('/var/a b.db', 'c.db')
    """
    scheme = _scheme(place)
    if not scheme:
        return Path(place).expanduser()
    parts = urlsplit(str(place))
    if scheme not in FILES:
        known = ", ".join(f"{name}://" for name in (*FILES, MEMORY, *REDIS, *POSTGRES))
        raise ValueError(f"{scheme}:// is not a backend of the response cache: a path, or one of {known}")
    if parts.netloc:
        raise ValueError(f"{place}: a file is written with three slashes, as in file:///var/cache.db")
    return Path(unquote(parts.path))


def _scheme(place: str | Path) -> str:
    return urlsplit(place).scheme if isinstance(place, str) and "://" in place else ""
