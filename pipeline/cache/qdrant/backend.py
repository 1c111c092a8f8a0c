"""Entries in Qdrant. It counts no bytes and has no transactions, and so this backend differs in two points:

- The capacity is looked after once in a while (after a 64th of it was put), by reading the accounts of all entries.
- An entry and its embedding are two points. A process that dies between them leaves an embedding without an answer,
  which is never served.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pipeline.cache.backend import ANY, EVERY, BackendDown, Candidate, Capacity, Fill, Kept, Vector, Which
from pipeline.cache.codec import Packed
from pipeline.cache.encryption import Codec
from pipeline.cache.packed_backend import PackedBackend
from pipeline.cache.qdrant.collections import Collections, Missing
from pipeline.cache.qdrant.points import IDS, Account, content, found_by, id_of, key_of, surplus, whole

_PAGE = 256  # entries that are read at a time
_ACCOUNTS = 10_000  # accounts that are read at a time
_SPARE = 64  # the capacity is looked after when a 64th of it was put
_ONLY = str(uuid.UUID(int=0))  # the point of changes


class QdrantBackend(PackedBackend):
    """See `pipeline.cache.backend.Backend`.

    >>> cache = QdrantBackend("qdrant://vectors.internal")     # doctest: +SKIP
    """

    remote = True

    def __init__(
        self,
        url: str,
        capacity: Capacity | None = None,
        *,
        name: str = "pipeline",
        codec: Codec | None = None,
        client: Any | None = None,
    ) -> None:
        """
        Args:
            url: qdrant://host[:port], or qdrants:// for TLS.
            name: whose cache it is; its collections begin so.
            client: a `qdrant_client.QdrantClient`, in place of one for `url`.

        Raises:
            ValueError: this is no address, `qdrant-client` is missing, or answers are to be encrypted.
        """
        super().__init__(capacity, codec)
        if self._vault.sealed:
            raise ValueError(
                "Qdrant searches embeddings that it can read: keep an encrypted cache in SQLite, Redis, Valkey or"
                " PostgreSQL"
            )
        self._collections = Collections(url, name, client)
        self._models = self._collections.models
        self._name = name
        self._lock = threading.Lock()
        self._entries_put = self._bytes_put = 0  # since the capacity was looked after

    def near(
        self, scope: bytes, vector: Vector, count: int, min_similarity: float = ANY
    ) -> Sequence[Candidate]:
        collection = self._collections.near(len(vector))
        try:
            found = self._collections.do(
                lambda client: client.query_points(
                    collection,
                    query=vector.tolist(),
                    query_filter=self._filter(Which(scope=scope)),
                    limit=count,
                    score_threshold=min_similarity,
                    with_payload=["turn"],
                )
            ).points
        except Missing:
            return []
        return self._vault.candidates(
            (key_of(point.id), content(point, "turn"), point.score) for point in found
        )

    def remove(self, keys: Iterable[bytes]) -> int:
        wanted = list(keys)
        pages = [wanted[at : at + _PAGE] for at in range(0, len(wanted), _PAGE)]
        return sum(self._remove([id_of(key) for key in page]) for page in pages)

    def purge(self, which: Which = EVERY) -> int:
        chosen = self._filter(which)
        try:
            there: int = self._collections.do(
                lambda client: client.count(self._collections.answers, chosen, exact=True)
            ).count
        except Missing:
            return 0
        if there:
            self._delete(self._models.FilterSelector(filter=chosen))
        return there

    def items(self) -> Iterator[Kept]:
        accounts = sorted(self._accounts(), key=lambda account: -account.created)
        for at in range(0, len(accounts), _PAGE):
            page = {account.id: account for account in accounts[at : at + _PAGE]}
            points = {point.id: point for point in self._retrieve(list(page), [*IDS, "turn", "answer"])}
            for id, account in page.items():
                if id in points:
                    yield from self._kept(points[id], account)

    def removals(self) -> int:
        try:
            points = self._collections.do(
                lambda client: client.retrieve(self._collections.changes, [_ONLY], with_payload=True)
            )
        except Missing:
            return 0
        return int(points[0].payload["at"]) if points else 0

    def fill(self) -> Fill:
        accounts = self._accounts()
        return Fill(
            len(accounts),
            sum(account.bytes for account in accounts),
            sum(account.embedded for account in accounts),
            min((account.created for account in accounts), default=None),
        )

    def describe(self) -> Mapping[str, str]:
        told = self._collections.do(lambda client: client.info())
        return {
            "kind": "qdrant",
            "server": self._collections.address,
            "name": self._name,
            "version": str(told.version),
            "embeddings": "HNSW",
        }

    def close(self) -> None:
        with suppress(BackendDown):  # what was used last is not worth more than leaving
            self._flush()
        self._collections.close()

    def _answer(self, key: bytes) -> bytes | None:
        points = self._retrieve([id_of(key)], ["answer"])
        return content(points[0], "answer") if points else None

    def _store(self, packed: Packed, vector: Vector | None) -> None:
        self._flush()
        replaces = bool(self._retrieve([id_of(packed.key)], []))
        self._upsert(packed, vector)
        if replaces:
            self._changed()
        with self._lock:
            self._entries_put += 1
            self._bytes_put += packed.size
            due = (
                self._entries_put >= self._capacity.entries // _SPARE
                or self._bytes_put >= self._capacity.bytes // _SPARE
            )
            if due:
                self._entries_put = self._bytes_put = 0
        if due:
            self._make_room(packed.created)

    def _upsert(self, packed: Packed, vector: Vector | None) -> None:
        """The embedding first: an answer whose embedding is missing would not be found by meaning until it expires."""
        models, collections, id = self._models, self._collections, id_of(packed.key)
        if vector is not None:
            near = collections.near(len(vector))
            collections.make(near, len(vector))
            embedding = models.PointStruct(id=id, vector=vector.tolist(), payload=found_by(packed))
            collections.do(lambda client: client.upsert(near, [embedding], wait=True))
        collections.make(collections.answers)
        answer = models.PointStruct(id=id, vector={}, payload=whole(packed, vector))
        collections.do(lambda client: client.upsert(collections.answers, [answer], wait=True))

    def _make_room(self, now: float) -> None:
        gone = surplus(self._accounts(), self._capacity, now)
        for at in range(0, len(gone), _PAGE):
            self._remove([account.id for account in gone[at : at + _PAGE]])

    def _remove(self, ids: list[str]) -> int:
        there = [point.id for point in self._retrieve(ids, [])]
        if there:
            self._delete(self._models.PointIdsList(points=there))
        return len(there)

    def _delete(self, selector: Any) -> None:
        for collection in (self._collections.answers, *self._collections.all_near()):
            self._collections.do(partial(_delete, collection, selector))
        self._changed()

    def _changed(self) -> None:
        changes, models = self._collections.changes, self._models
        self._collections.make(changes)
        point = models.PointStruct(id=_ONLY, vector={}, payload={"at": time.time_ns()})
        self._collections.do(lambda client: client.upsert(changes, [point], wait=True))

    def _flush(self) -> None:
        if not (touched := self._uses.take()):  # written as one moment
            return
        models = self._models
        chosen = models.Filter(must=[models.HasIdCondition(has_id=[id_of(key) for key in touched])])
        with suppress(Missing):
            self._collections.do(
                lambda client: client.set_payload(
                    self._collections.answers, {"used": max(touched.values())}, points=chosen, wait=True
                )
            )

    def _retrieve(self, ids: list[str], fields: list[str]) -> list[Any]:
        try:
            points: list[Any] = self._collections.do(
                lambda client: client.retrieve(self._collections.answers, ids, with_payload=fields or False)
            )
        except Missing:
            return []
        return points

    def _accounts(self) -> list[Account]:
        accounts: list[Account] = []
        offset: Any = None
        while True:
            try:
                points, offset = self._collections.do(partial(_scroll, self._collections.answers, offset))
            except Missing:
                return []
            accounts += [account for point in points if (account := Account.of(point)) is not None]
            if offset is None:
                return accounts

    def _kept(self, point: Any, account: Account) -> Iterator[Kept]:
        key = key_of(point.id)
        opened = self._vault.both(content(point, "turn"), content(point, "answer"), key)
        if opened is not None:
            scope, engine, tenant = (bytes.fromhex(point.payload[id]) for id in IDS)
            yield Kept(key, scope, engine, tenant, *opened, account.used, account.embedded)

    def _filter(self, which: Which) -> Any:
        models = self._models
        must = [
            models.FieldCondition(key=name, match=models.MatchValue(value=id.hex()))
            for name, id in which.ids().items()
        ]
        if which.before is not None:
            must.append(models.FieldCondition(key="created", range=models.Range(lt=which.before)))
        return models.Filter(must=must)


def _delete(collection: str, selector: Any, client: Any) -> None:
    client.delete(collection, selector, wait=True)


def _scroll(collection: str, offset: Any, client: Any) -> Any:
    return client.scroll(collection, limit=_ACCOUNTS, offset=offset, with_payload=list(Account.FIELDS))
