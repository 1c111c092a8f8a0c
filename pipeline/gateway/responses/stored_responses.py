"""The memory of responses: what `previous_response_id` continues, and GET /v1/responses/{id} returns.

It is bounded for each tenant in number, size and age, and no tenant is ever told of another's. A response keeps its own
input and output; the conversation before it is found by the ids of its predecessors, so that a conversation of many
turns is kept once. The memory is an SQLite database: within the process, or in a file that several share while they
serve one gateway together. It is not meant to outlive them.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from pipeline.gateway.responses.input_items import Item
from pipeline.sqlite_file import open_database

_MIB = 2**20
_VERSION = 1  # of the tables
_TABLES = """
CREATE TABLE responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, previous TEXT, response BLOB NOT NULL, input BLOB NOT NULL,
    size INTEGER NOT NULL, used REAL NOT NULL, UNIQUE (tenant, id)
);
CREATE INDEX responses_of ON responses (tenant, used, size);
CREATE INDEX responses_used ON responses (used);
"""
# Of all tenants: one that asks no more is forgotten, too.
_FORGET_OLD = "DELETE FROM responses WHERE used < ?"
_TOTAL = "SELECT count(*), coalesce(sum(size), 0) FROM responses WHERE tenant = ?"
_FORGET_LONGEST_UNUSED = """
DELETE FROM responses WHERE rowid =
    (SELECT rowid FROM responses WHERE tenant = ? ORDER BY used, rowid LIMIT 1)
"""
_CHAIN = """
WITH RECURSIVE chain (rowid, previous, size, depth) AS (
    SELECT rowid, previous, size, 0 FROM responses WHERE tenant = :tenant AND id = :id
    UNION ALL
    SELECT responses.rowid, responses.previous, responses.size, depth + 1 FROM responses
    JOIN chain ON responses.tenant = :tenant AND responses.id = chain.previous
)
SELECT rowid, previous, size FROM chain ORDER BY depth
"""


@dataclass(frozen=True, slots=True)
class StoredResponseLimits:
    """Bounds of the memory of one tenant.

    Attributes:
        count: most responses; 0 keeps none.
        bytes: most bytes of JSON of them.
        age_s: seconds after which a response that was not used is forgotten.
    """

    count: int = 1000
    bytes: int = 32 * _MIB
    age_s: float = 3600.0


class StoredResponse(NamedTuple):
    """One response.

    Attributes:
        response: OpenAI's object, as JSON.
        input: list of its own input items, as JSON.
        previous: id of the response that it continues.
    """

    response: bytes
    input: bytes
    previous: str | None

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return len(self.response) + len(self.input)

    def items(self) -> list[Item]:
        """Return the items of its input and of its output."""
        return [*json.loads(self.input), *json.loads(self.response)["output"]]


class StoredConversation(NamedTuple):
    """What came before a response.

    Attributes:
        items: inputs and outputs, the oldest first.
        complete: whether these are all; the oldest are left out where there are too many.
    """

    items: Sequence[Item]
    complete: bool = True


class StoredResponses:
    """Responses of all tenants. Safe to use from any thread."""

    def __init__(
        self,
        limits: StoredResponseLimits = StoredResponseLimits(),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            limits: for each tenant. What is too much is forgotten, the longest unused first.
            file: of the database, for processes that share it; None keeps it within this one.
            clock: monotonic time in seconds, the same in all of these processes.
        """
        self._limits, self._clock, self._lock = limits, clock, threading.Lock()
        if file is None:
            self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._database.executescript(_TABLES)
        else:
            kind = "a memory of responses"
            self._database = open_database(file, kind, _TABLES, _VERSION, power_safe=False)

    @property
    def enabled(self) -> bool:
        """Whether any response is kept."""
        return self._limits.count > 0

    def put(self, tenant: str, id: str, response: StoredResponse) -> None:
        """Remember a response.

        Args:
            tenant: name of the tenant.
            id: of the response.
            response: what is kept of it; one that is larger than all may be is not kept.
        """
        if response.size > self._limits.bytes:
            return
        values = (response.previous, response.response, response.input, response.size, self._clock())
        # One transaction: two processes that count at once would both forget for the same one.
        with self._lock, self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._forget_old()
            self._database.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", (tenant, id, *values)
            )
            while self._is_too_much(*self._database.execute(_TOTAL, (tenant,)).fetchone()):
                self._database.execute(_FORGET_LONGEST_UNUSED, (tenant,))

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """Return a response of a tenant; None if there is none, or none any more."""
        with self._lock:
            self._forget_old()
            row = self._database.execute(
                "SELECT response, input, previous FROM responses WHERE tenant = ? AND id = ?", (tenant, id)
            ).fetchone()
        return None if row is None else StoredResponse(*row)

    def delete(self, tenant: str, id: str) -> bool:
        """Forget a response, and return whether there was one. What continues it cannot be continued any more."""
        with self._lock:
            self._forget_old()
            deleted = "DELETE FROM responses WHERE tenant = ? AND id = ?"
            return self._database.execute(deleted, (tenant, id)).rowcount > 0

    def size(self, tenant: str, id: str) -> int:
        """Return the bytes of JSON of the conversation up to a response; 0 if it is not remembered as a whole."""
        with self._lock:
            return sum(size for _, size in self._chain(tenant, id))

    def conversation(
        self, tenant: str, id: str, *, most_items: int, most_bytes: int
    ) -> StoredConversation | None:
        """Return the conversation up to a response, and count all of it as used.

        Args:
            tenant: name of the tenant.
            id: of the last response.
            most_items: stop before there are more.
            most_bytes: stop before there are more, of JSON.

        Returns:
            The conversation; None if the response, or one before it, is not remembered.
        """
        with self._lock:
            chain = self._chain(tenant, id)
            if not chain:
                return None
            used = [(self._clock(), row) for row, _ in chain]
            self._database.executemany("UPDATE responses SET used = ? WHERE rowid = ?", used)
            sizes = accumulate(size for _, size in chain)
            rows = [row for (row, _), size in zip(chain, sizes, strict=True) if size <= most_bytes]
            read = "SELECT response, input, previous FROM responses WHERE rowid = ?"
            found = [self._database.execute(read, (row,)).fetchone() for row in rows]
        turns: list[list[Item]] = []
        for values in found:
            turn = StoredResponse(*values).items()
            most_items -= len(turn)
            if most_items < 0:
                break
            turns.append(turn)
        items = [item for turn in reversed(turns) for item in turn]
        return StoredConversation(items, complete=len(turns) == len(chain))

    def close(self) -> None:
        """Forget everything, unless other processes have it, too."""
        self._database.close()

    def _chain(self, tenant: str, id: str) -> list[tuple[int, int]]:
        """Row and size of a response and of all before it, the newest first; none if one is missing."""
        self._forget_old()
        chain = self._database.execute(_CHAIN, {"tenant": tenant, "id": id}).fetchall()
        whole = bool(chain) and chain[-1][1] is None
        return [(row, size) for row, _, size in chain] if whole else []

    def _is_too_much(self, count: int, size: int) -> bool:
        return count > self._limits.count or size > self._limits.bytes

    def _forget_old(self) -> None:
        self._database.execute(_FORGET_OLD, (self._clock() - self._limits.age_s,))
