"""Stored responses: what `previous_response_id` continues, and GET /v1/responses/{id} returns.

They are bounded for each tenant in number, size and age, and no tenant ever learns of another's. A response is stored
with its own input and output; the conversation before it is found by the ids of its predecessors, so that a
conversation of many turns is stored once. Here is the protocol, and its form in an SQL database: the memory of the
process, a file that the workers of one gateway share while they run, or a server. `redis` has the other form.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipeline.cache.encryption import Codec, UnreadableEntry
from pipeline.gateway.database import SqliteDatabase, StateDatabase, marks, sqlite_tables
from pipeline.gateway.errors import ApiError
from pipeline.sqlite_file import open_database

Item = Mapping[str, Any]  # item of the input or the output of a response
_MIB = 2**20
RESPONSE_TABLES = (files("pipeline.gateway") / "data" / "responses.sql").read_text(encoding="utf-8")
_VERSION = 2  # version of the tables
_FORGET_OLD = "DELETE FROM responses WHERE tenant = %s AND used < %s"
# Beyond the bounds of a tenant: most responses, most bytes.
_FORGET_LONGEST_UNUSED = """
DELETE FROM responses WHERE n IN (
    SELECT n FROM (
        SELECT n, row_number() OVER latest AS place, sum(size) OVER latest AS total FROM responses WHERE tenant = %s
        WINDOW latest AS (ORDER BY used DESC, n DESC)
    ) AS ranked WHERE place > %s OR total > %s
)
"""
_CHAIN = """
WITH RECURSIVE chain (id, previous, size, depth) AS (
    SELECT id, previous, size, 0 FROM responses WHERE tenant = %s AND id = %s AND used >= %s
    UNION ALL
    SELECT r.id, r.previous, r.size, depth + 1 FROM responses r JOIN chain ON r.id = chain.previous
    WHERE r.tenant = %s AND r.used >= %s
)
SELECT id, previous, size FROM chain ORDER BY depth
"""


@dataclass(frozen=True, slots=True)
class StoredResponseLimits:
    """Bounds for one tenant.

    Attributes:
        count: most responses; 0 stores none.
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
    """Turns up to a response.

    Attributes:
        items: input and output items, the oldest first.
        size: bytes of their JSON.
        complete: whether these are all items; the oldest are left out where there are too many.
    """

    items: Sequence[Item] = ()
    size: int = 0
    complete: bool = True


class StoredResponses(Protocol):
    """Responses of all tenants. Safe to use from any thread.

    All methods block, and raise `ApiError` (503) if the database cannot be used.
    """

    @property
    def enabled(self) -> bool:
        """Whether any response is stored."""

    def put(self, tenant: str, id: str, response: StoredResponse) -> bool:
        """Store a response, and return whether it is; a response that is larger than all may be together is not.

        The longest unused responses of the tenant are forgotten where there are too many.
        """

    def find(self, tenant: str, ids: Collection[str]) -> Mapping[str, StoredResponse]:
        """Return responses of a tenant by their ids, without those that are not stored, or not any more."""

    def delete(self, tenant: str, id: str) -> bool:
        """Forget a response, and return whether there was one. What continues it cannot be continued any more."""

    def conversation(
        self, tenant: str, id: str, *, most_items: int, most_bytes: int
    ) -> StoredConversation | None:
        """Return the conversation up to a response, and count all of it as used.

        It has the newest turns within `most_items`, and `most_bytes` of JSON. None if the response, or one before it,
        is not stored.
        """

    def forget_old(self) -> None:
        """Delete responses that have not been used for too long; called periodically."""

    def close(self) -> None:
        """Close what is open."""


class NoStoredResponses:
    """`StoredResponses` of a gateway that stores nothing; requests that need a stored response are refused."""

    enabled = False

    def put(self, *_: object) -> bool:
        return False

    def find(self, *_: object) -> Mapping[str, StoredResponse]:
        raise _not_stored()

    def delete(self, *_: object) -> bool:
        raise _not_stored()

    def conversation(self, *_: object, **__: object) -> StoredConversation | None:
        raise _not_stored()

    def forget_old(self) -> None:
        pass

    def close(self) -> None:
        pass


def _not_stored() -> ApiError:
    text = (
        "This server stores no responses (gateway.stored_responses: 0), so none can be read, continued or referred to; "
        "send the whole conversation as input"
    )
    return ApiError(501, text, code="responses_not_stored")


class SqlStoredResponses:
    """Responses in an SQL database."""

    enabled = True

    def __init__(
        self, database: StateDatabase, limits: StoredResponseLimits, clock: Callable[[], float] = time.time
    ) -> None:
        """`database` has `RESPONSE_TABLES`; `clock` gives seconds since the epoch."""
        self._database, self._limits, self._clock = database, limits, clock

    @classmethod
    def of_gateway(cls, limits: StoredResponseLimits, file: Path | None = None) -> SqlStoredResponses:
        """Store responses for as long as the gateway runs: in a file that its workers share, or in memory."""
        if file is None:
            return cls(SqliteDatabase.in_memory(RESPONSE_TABLES), limits)
        tables = sqlite_tables(RESPONSE_TABLES)
        kind = "a database of responses"
        return cls(
            SqliteDatabase(lambda: open_database(file, kind, tables, _VERSION, power_safe=False), file),
            limits,
        )

    def put(self, tenant: str, id: str, response: StoredResponse) -> bool:
        limits = self._limits
        if response.size > limits.bytes:
            return False
        sealed = seal_response(self._database.codec, tenant, id, response)
        with self._database.transaction(tenant) as execute:
            execute(_FORGET_OLD, tenant, self._oldest())
            row = (tenant, id, response.previous, *sealed, response.size, self._clock())
            # It is there already where the answer to a commit was lost.
            execute(
                "INSERT INTO responses (tenant, id, previous, response, input, size, used)"
                f" VALUES {marks(row)} ON CONFLICT DO NOTHING",
                *row,
            )
            execute(_FORGET_LONGEST_UNUSED, tenant, limits.count, limits.bytes)
        return True

    def find(self, tenant: str, ids: Collection[str]) -> Mapping[str, StoredResponse]:
        if not ids:
            return {}
        rows = self._database.read(
            "SELECT id, response, input, previous FROM responses"
            f" WHERE tenant = %s AND used >= %s AND id IN {marks(tuple(ids))}",
            tenant,
            self._oldest(),
            *ids,
        )
        return dict(unseal_responses(self._database.codec, tenant, rows))

    def delete(self, tenant: str, id: str) -> bool:
        with self._database.transaction(tenant) as execute:
            return execute("DELETE FROM responses WHERE tenant = %s AND id = %s", tenant, id).rowcount > 0

    def conversation(
        self, tenant: str, id: str, *, most_items: int, most_bytes: int
    ) -> StoredConversation | None:
        with self._database.transaction(tenant) as execute:
            oldest = self._oldest()
            chain = execute(_CHAIN, tenant, id, oldest, tenant, oldest).fetchall()
            if not chain or chain[-1][1] is not None:
                return None
            ids = [row[0] for row in chain]
            used = f"UPDATE responses SET used = %s WHERE tenant = %s AND id IN {marks(ids)}"
            execute(used, self._clock(), tenant, *ids)
        return conversation_of(
            [(id, size) for id, _, size in chain],
            lambda wanted: self.find(tenant, wanted),
            most_items,
            most_bytes,
        )

    def forget_old(self) -> None:
        oldest = self._oldest()
        for (tenant,) in self._database.read("SELECT DISTINCT tenant FROM responses WHERE used < %s", oldest):
            with self._database.transaction(tenant) as execute:
                execute(_FORGET_OLD, tenant, oldest)

    def close(self) -> None:
        self._database.close()

    def _oldest(self) -> float:
        return self._clock() - self._limits.age_s


def conversation_of(
    chain: Sequence[tuple[str, int]],
    find: Callable[[Collection[str]], Mapping[str, StoredResponse]],
    most_items: int,
    most_bytes: int,
) -> StoredConversation | None:
    """Read the newest turns of a conversation, as many as the bounds allow.

    Args:
        chain: id and bytes of each response, the newest first.
        find: reads responses.
        most_bytes: most bytes of JSON.

    Returns:
        The conversation; None if one of these responses was forgotten meanwhile.
    """
    totals = accumulate(size for _, size in chain)
    ids = [id for (id, _), total in zip(chain, totals, strict=True) if total <= most_bytes]
    responses = find(ids)
    turns: list[list[Item]] = []
    read = 0
    for id in ids:
        if (response := responses.get(id)) is None:
            return None
        turn = response.items()
        most_items -= len(turn)
        if most_items < 0:
            break
        turns.append(turn)
        read += response.size
    items = [item for turn in reversed(turns) for item in turn]
    return StoredConversation(items, read, complete=len(turns) == len(chain))


def seal_response(codec: Codec, tenant: str, id: str, response: StoredResponse) -> tuple[bytes, bytes]:
    """Return response and input as a server stores them."""
    content = (("response", response.response), ("input", response.input))
    response_blob, input_blob = (codec.seal(part, _key(tenant, id, kind)) for kind, part in content)
    return response_blob, input_blob


def unseal_responses(
    codec: Codec, tenant: str, rows: Iterable[tuple[str, bytes, bytes, str | None]]
) -> Iterator[tuple[str, StoredResponse]]:
    """Return responses of rows of id, response, input and previous, without those sealed with another key."""
    for id, response, request_input, previous in rows:
        with suppress(UnreadableEntry):
            opened = (
                codec.open(response, _key(tenant, id, "response")),
                codec.open(request_input, _key(tenant, id, "input")),
            )
            yield id, StoredResponse(*opened, previous)


def _key(tenant: str, id: str, kind: str) -> bytes:
    """Bind sealed content to its response."""
    return "\0".join(("response", tenant, id, kind)).encode()
