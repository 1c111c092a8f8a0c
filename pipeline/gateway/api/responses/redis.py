"""Stored responses in Redis or Valkey, which several gateways share, by the commands of data/stored_responses.lua.

Written against Redis 6.2 and newer, with redis-py 5 to 8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from importlib.resources import files
from typing import Any

from pipeline.cache.encryption import Codec
from pipeline.cache.redis_server import RedisAddress, RedisConnections
from pipeline.gateway.api.responses.stored import (
    StoredConversation,
    StoredResponse,
    StoredResponseLimits,
    conversation_of,
    seal_response,
    unseal_responses,
)
from pipeline.gateway.database import ServerFaults

_COMMANDS = (files("pipeline.gateway") / "data" / "stored_responses.lua").read_text(encoding="utf-8")


class RedisStoredResponses:
    """See `stored.StoredResponses`."""

    enabled = True

    def __init__(
        self,
        address: RedisAddress,
        codec: Codec,
        limits: StoredResponseLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Connects at the first use, with the password of the environment.

        Raises:
            ValueError: the distribution `redis` is missing.
        """
        self._codec, self._limits, self._clock = codec, limits, clock
        self._server = RedisConnections(address)
        self._commands = self._server.script(_COMMANDS)
        self._faults = ServerFaults(f"stored responses at {address}")

    def put(self, tenant: str, id: str, response: StoredResponse) -> bool:
        limits = self._limits
        if response.size > limits.bytes:
            return False
        sealed = seal_response(self._codec, tenant, id, response)
        self._run(
            *("put", tenant, repr(self._clock()), self._age_ms, id, response.previous or ""),
            *(*sealed, response.size, limits.count, limits.bytes),
        )
        return True

    def find(self, tenant: str, ids: Collection[str]) -> Mapping[str, StoredResponse]:
        if not ids:
            return {}
        stored = self._run("find", tenant, *ids)
        rows = [
            (id, row[0], row[1], row[2].decode() or None)
            for id, row in zip(ids, stored, strict=True)
            if row is not None
        ]
        return dict(unseal_responses(self._codec, tenant, rows))

    def delete(self, tenant: str, id: str) -> bool:
        return bool(self._run("delete", tenant, id))

    def conversation(
        self, tenant: str, id: str, *, most_items: int, most_bytes: int
    ) -> StoredConversation | None:
        chained = self._run("chain", tenant, repr(self._clock()), self._age_ms, id)
        chain = [(id.decode(), int(size)) for id, size in zip(chained[::2], chained[1::2], strict=True)]
        if not chain:
            return None
        return conversation_of(chain, lambda wanted: self.find(tenant, wanted), most_items, most_bytes)

    def forget_old(self) -> None:
        """The server does."""

    def close(self) -> None:
        self._server.close()

    @property
    def _age_ms(self) -> int:
        return max(1, round(self._limits.age_s * 1000))

    def _run(self, command: str, tenant: str, *arguments: object) -> Any:
        oldest = repr(self._clock() - self._limits.age_s)
        with self._faults.attempt():
            return self._commands(f"pipeline:responses:{tenant}", (command, oldest, *arguments))
