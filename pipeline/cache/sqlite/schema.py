"""Tables of the embedded cache."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from pipeline.cache.backend import BackendDown
from pipeline.sqlite_file import open_database

VERSION = 2  # PRAGMA user_version; another one is refused, never guessed at

_TABLES = """
CREATE TABLE entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,   -- rises with every put: indexes read on from the last they saw
    key BLOB NOT NULL UNIQUE,
    scope BLOB NOT NULL,
    engine BLOB NOT NULL,
    tenant BLOB NOT NULL,
    turn BLOB NOT NULL,
    answer BLOB NOT NULL,
    vector BLOB,                            -- float16, or nothing
    created REAL NOT NULL,
    expires REAL NOT NULL,
    used REAL NOT NULL,
    bytes INTEGER NOT NULL
);
CREATE INDEX by_use ON entries (used);
CREATE INDEX by_scope ON entries (scope);
CREATE TABLE totals (
    entries INTEGER NOT NULL, bytes INTEGER NOT NULL, vectors INTEGER NOT NULL,
    removals INTEGER NOT NULL               -- rises with every entry that goes, or is replaced
);
INSERT INTO totals VALUES (0, 0, 0, 0);
CREATE TRIGGER come AFTER INSERT ON entries BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.bytes, vectors = vectors + (new.vector IS NOT NULL);
END;
CREATE TRIGGER gone AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.bytes, vectors = vectors - (old.vector IS NOT NULL),
        removals = removals + 1;
END;
"""


def connect(path: Path, *, power_safe: bool) -> sqlite3.Connection:
    """A connection to the cache at `path`, which is made if need be.

    Args:
        power_safe: a put waits for the disk; without, a power cut may cost the last ones (never the file).

    Raises:
        BackendDown: the file cannot be used; the text says why.
    """
    try:
        connection = open_database(path, "a cache", _TABLES, VERSION, power_safe=power_safe)
        # 2 MiB for each connection, of which every reading thread has one: the file is mapped besides.
        connection.execute("PRAGMA cache_size = -2048")
        connection.execute("PRAGMA mmap_size = 268435456")
    except (sqlite3.Error, OSError) as error:
        raise BackendDown(f"{path}: {error}") from error
    return connection
