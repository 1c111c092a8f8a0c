"""Files and batches in PostgreSQL, which several gateways share. The bytes of a file are rows of 1 MiB."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, BinaryIO

from pipeline.cache.encryption import Codec, UnreadableEntry
from pipeline.gateway.errors import ApiError
from pipeline.gateway.state.database import Execute, StorageFailed
from pipeline.gateway.state.postgres import PostgresDatabase

_PART_BYTES = 2**20


class PostgresBatches:
    """See `pipeline.gateway.batches.rows.BatchPlace`."""

    in_use = True

    def __init__(self, database: PostgresDatabase) -> None:
        """
        Args:
            database: a database with `BATCH_TABLES` and `CONTENT_TABLES`.
        """
        self._database = database

    @property
    def codec(self) -> Codec:
        return self._database.codec

    def read(self, query: str, *values: Any) -> list[Any]:
        return self._database.read(query, *values)

    def transaction(self, lock: str) -> AbstractContextManager[Execute]:
        return self._database.transaction(lock)

    def close(self) -> None:
        self._database.close()

    def write(self, id: str, parts: Iterable[bytes]) -> int:
        size = 0
        try:
            for number, part in enumerate(_of_one_size(parts)):
                # Written twice, if the answer to the first time was lost.
                self._database.write(
                    "INSERT INTO contents (file, part, written, bytes) VALUES (%s, %s, clock(), %s)"
                    " ON CONFLICT DO NOTHING",
                    id,
                    number,
                    self.codec.seal(part, _key(id, number)),
                )
                size += len(part)
        except BaseException:
            with suppress(ApiError):
                self.remove(id)
            raise
        return size

    def open(self, id: str) -> BinaryIO:
        return io.BufferedReader(_Parts(self._database, id), _PART_BYTES)

    def remove(self, id: str) -> None:
        self._database.write("DELETE FROM contents WHERE file = %s", id)

    def remove_unknown(self, older_s: float) -> None:
        self._database.write(
            "DELETE FROM contents WHERE written < clock() - %s AND file NOT IN (SELECT id FROM files)",
            older_s,
        )


def _of_one_size(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Cut bytes anew, into parts of the size of a row."""
    held = bytearray()
    for part in parts:
        held += part
        while len(held) >= _PART_BYTES:
            yield bytes(held[:_PART_BYTES])
            del held[:_PART_BYTES]
    if held:
        yield bytes(held)


class _Parts(io.RawIOBase):
    """The bytes of a file, as a file."""

    def __init__(self, database: PostgresDatabase, id: str) -> None:
        self._database, self._id = database, id
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the size is not known here")
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        number, start = divmod(self._at, _PART_BYTES)
        rows = self._database.read(
            "SELECT bytes FROM contents WHERE file = %s AND part = %s", self._id, number
        )
        if not rows:
            return 0
        try:
            part = self._database.codec.open(rows[0][0], _key(self._id, number))
        except UnreadableEntry as error:
            raise StorageFailed from error
        read = part[start : start + len(buffer)]
        buffer[: len(read)] = read
        self._at += len(read)
        return len(read)


def _key(file: str, number: int) -> bytes:
    """Bind a sealed part to its place in a file."""
    return f"content\0{file}\0{number}".encode()
