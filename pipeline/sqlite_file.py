"""One SQLite file that several processes open: private to its owner (0600), in WAL mode, its tables made once.

SQLite gives the files beside it, -wal and -shm, the mode of the file.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from pipeline.private_files import make_private, tighten

_BUSY_S = 5.0


def open_database(
    path: Path, kind: str, tables: str, version: int, *, power_safe: bool
) -> sqlite3.Connection:
    """Open a database, and make it if need be.

    Args:
        kind: Noun for messages, such as "a cache".
        tables: SQL that makes the tables of a new file.
        version: Version of the tables, kept as `PRAGMA user_version`.
        power_safe: a commit waits for the disk; without, a power cut may cost the last ones, never the file.

    Returns:
        A connection for any one thread at a time, in autocommit mode.

    Raises:
        sqlite3.Error: it cannot be used, or is of another version.
        OSError: the file or its folder cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path, own=True)
    # Of a process that ran before the file was private, or still runs.
    for beside in ("-wal", "-shm"):
        tighten(Path(f"{path.resolve()}{beside}"))
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _write_ahead(connection)
        connection.execute(f"PRAGMA synchronous = {'FULL' if power_safe else 'NORMAL'}")
        _create(connection, tables, version)
        stored = connection.execute("PRAGMA user_version").fetchone()[0]
        if stored != version:
            text = f"is {kind} of version {stored}, this is {version}; purge it, or name another file"
            raise sqlite3.DatabaseError(text)
    except BaseException:
        connection.close()
        raise
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


def _create(connection: sqlite3.Connection, tables: str, version: int) -> None:
    if connection.execute("PRAGMA user_version").fetchone()[0]:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Unless another process was faster.
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            for statement in _statements(tables):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
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
