"""Tables of the embedded cache, and how one file is opened by many processes.

The file holds questions and answers, so that only its owner may read it (0600); SQLite gives the files beside it, -wal
and -shm, the same mode.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from pipeline.cache.backend import BackendDown
from pipeline.private_files import make_private, tighten

VERSION = 2  # PRAGMA user_version; another one is refused, never guessed at
_BUSY_S = 5.0

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
    connection: sqlite3.Connection | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        make_private(path, own=True)
        for beside in ("-wal", "-shm"):  # of a process that ran before the file was private, or still runs
            tighten(Path(f"{path.resolve()}{beside}"))
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        _write_ahead(connection)
        connection.execute(f"PRAGMA synchronous = {'FULL' if power_safe else 'NORMAL'}")
        # 2 MiB for each connection, of which every reading thread has one: the file is mapped besides.
        connection.execute("PRAGMA cache_size = -2048")
        connection.execute("PRAGMA mmap_size = 268435456")
        _create(connection)
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        raise BackendDown(f"{path}: {error}") from error
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != VERSION:
        connection.close()
        raise BackendDown(
            f"{path}: is a cache of version {found}, this is {VERSION}; purge it, or name another file"
        )
    return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to WAL. SQLite does not wait when several switch a new file at once, so we do."""
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _create(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA user_version").fetchone()[0]:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:  # nobody was faster
            for statement in _statements(_TABLES):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> list[str]:
    statements, text = [], ""
    for line in script.splitlines():
        text += line + "\n"
        if sqlite3.complete_statement(text):
            statements.append(text)
            text = ""
    return statements
