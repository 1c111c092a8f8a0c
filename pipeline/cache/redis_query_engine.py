"""Nearest entries by the query engine of a Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.cache.backend import BackendDown, Vector
from pipeline.cache.redis_server import CommandRefused, RedisConnections

# Formats of embeddings; the first one that the server knows is used.
_FORMATS = {"FLOAT16": "<f2", "FLOAT32": "<f4"}
_LINKS, _BUILD_EFFORT, _SEARCH_EFFORT = 16, 128, 64


class QueryEngine:
    """The server's query engine, where it has one: an HNSW index of all embeddings, asked within one scope.

    Written against RediSearch 2.10 (Redis Stack 7.4, Redis 8) and the search module of Valkey. The server must read the
    embeddings for this, so that sealed ones are indexed in the memory of each process instead.
    """

    def __init__(self, server: RedisConnections, prefix: str) -> None:
        self._server = server
        self._prefix = prefix
        self._exists: bool | None = None
        # Dimensions -> format of the index that is there.
        self._made: dict[int, str] = {}

    def is_there(self) -> bool:
        """Whether the server has a query engine."""
        if self._exists is None:
            try:
                self._server.call("FT._LIST")
                self._exists = True
            except CommandRefused:
                self._exists = False
        return self._exists

    def field(self, vector: Vector) -> tuple[str, bytes]:
        """Return name and value of the hash field for an embedding, and make the index if need be."""
        kind = self._made.get(len(vector)) or self._make(len(vector))
        return f"{kind}:{len(vector)}", _packed(vector, kind)

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float
    ) -> list[tuple[bytes, float]]:
        """Find keys and cosines of the nearest entries of a scope that are near enough, the nearest first.

        It does not return the questions: RediSearch 2.10 cuts a field that it returns at its first zero byte.
        """
        try:
            reply = self._search(scope, vector, count)
        except CommandRefused:
            # Such as after a restart without data: the index is made again.
            self._made.pop(len(vector), None)
            reply = self._search(scope, vector, count)
        start = len(f"{self._prefix}entry:")
        near = [
            (name[start:], 1 - float(fields[1]))
            for name, fields in zip(reply[::2], reply[1::2], strict=True)
            if fields
        ]
        return sorted((pair for pair in near if pair[1] >= min_similarity), key=lambda pair: -pair[1])

    def _search(self, scope: bytes, vector: Vector, count: int) -> Sequence[Any]:
        size = len(vector)
        kind = self._made.get(size) or self._make(size)
        query = f"(@scope:{{{scope.hex()}}})=>[KNN {count} @embedding $vector AS distance]"
        reply: Sequence[Any] = self._server.call(
            "FT.SEARCH", self._index(size), query, "PARAMS", 2, "vector", _packed(vector, kind),
            "RETURN", 1, "distance", "LIMIT", 0, count, "DIALECT", 2,
        )  # fmt: skip
        # Without their number.
        return reply[1:]

    def _index(self, dimensions: int) -> str:
        return f"{self._prefix}near:{dimensions}"

    def _make(self, dimensions: int) -> str:
        refusals = []
        for kind in _FORMATS:
            try:
                self._create(dimensions, kind)
            except CommandRefused as error:
                if "already exists" not in str(error).lower():
                    refusals.append(str(error))
                    continue
                kind = self._format_of(dimensions)
            self._made[dimensions] = kind
            return kind
        raise BackendDown("; ".join(refusals))

    def _create(self, dimensions: int, kind: str) -> None:
        parameters: Sequence[object] = (
            "TYPE", kind, "DIM", dimensions, "DISTANCE_METRIC", "COSINE",
            "M", _LINKS, "EF_CONSTRUCTION", _BUILD_EFFORT, "EF_RUNTIME", _SEARCH_EFFORT,
        )  # fmt: skip
        self._server.call(
            "FT.CREATE", self._index(dimensions), "ON", "HASH", "PREFIX", 1, f"{self._prefix}entry:",
            "SCHEMA", "scope", "TAG",
            f"{kind}:{dimensions}", "AS", "embedding", "VECTOR", "HNSW", len(parameters), *parameters,
        )  # fmt: skip

    def _format_of(self, dimensions: int) -> str:
        """Return the format of an index that another process made."""
        information = repr(self._server.call("FT.INFO", self._index(dimensions)))
        return next(kind for kind in _FORMATS if f"{kind}:{dimensions}" in information)


def _packed(vector: Vector, kind: str) -> bytes:
    return np.asarray(vector, _FORMATS[kind]).tobytes()
