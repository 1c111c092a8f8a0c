"""A client of Qdrant whose failures are `BackendDown`, quickly; and the collections of one cache, made when needed.

    NAME-answers      one point an entry, without a vector: what it is, when it was made and used
    NAME-near-384     one point an entry with an embedding of that length: the embedding, scope and question
    NAME-changes      one point, which changes whenever an entry goes or is replaced

Written against qdrant-client 1.12 to 1.20.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pipeline.cache.backend import BackendDown
from pipeline.cache.circuit_breaker import Rest, Unanswered
from pipeline.cache.password import PASSWORD, without_password
from pipeline.extras import install_line

SCHEMES = ("qdrant", "qdrants")
_PORT = 6333
_ANSWER_S = 2
_NOT_FOUND, _CONFLICT = 404, 409
T = TypeVar("T")


class Missing(BackendDown):
    """A collection is not there: nothing was put yet, or somebody removed it."""


class Collections:
    """Safe to use from any number of threads. Nothing is connected before the first call."""

    def __init__(self, url: str, name: str, client: Any | None = None, rest: Rest | None = None) -> None:
        """
        Args:
            url: qdrant://host[:port], or qdrants:// for TLS.
            client: used in place of one for `url`.

        Raises:
            ValueError: this is no address, or the distribution `qdrant-client` is missing.
        """
        try:
            import qdrant_client
            from qdrant_client.http import exceptions
        except ImportError as error:
            raise ValueError(f"{error}: the cache in Qdrant needs: {install_line('qdrant')}") from None
        parts = urlsplit(without_password(url))
        if parts.scheme not in SCHEMES or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"{url}: write qdrant://host:{_PORT}, or qdrants://host:{_PORT} for TLS")
        self.models = qdrant_client.models
        self.address = f"{parts.hostname}:{parts.port or _PORT}"
        self.answers, self.changes = f"{name}-answers", f"{name}-changes"
        self._near = f"{name}-near-"
        self._errors = exceptions
        self._rest = rest or Rest()
        self._made: set[str] = set()
        self._client = client or qdrant_client.QdrantClient(
            host=parts.hostname,
            port=parts.port or _PORT,
            https=parts.scheme == "qdrants",
            api_key=os.environ.get(PASSWORD) or None,
            timeout=_ANSWER_S,
            check_compatibility=False,  # which would ask the server now
        )

    def near(self, dimensions: int) -> str:
        """The collection of embeddings of a length."""
        return f"{self._near}{dimensions}"

    def all_near(self) -> list[str]:
        """The collections of embeddings that are there."""
        found = self.do(lambda client: client.get_collections()).collections
        return [collection.name for collection in found if collection.name.startswith(self._near)]

    def do(self, work: Callable[[Any], T]) -> T:
        """What `work` does with the client. Raises Missing, Unanswered, or another BackendDown."""
        with self._rest.attempt():
            try:
                return work(self._client)
            except self._errors.ResponseHandlingException as error:
                raise Unanswered(f"{self.address}: {error}") from error
            except self._errors.UnexpectedResponse as error:
                if error.status_code == _NOT_FOUND:
                    self._made.clear()
                    raise Missing(f"{self.address}: {error}") from error
                raise BackendDown(f"{self.address}: {error}") from error

    def make(self, collection: str, dimensions: int | None = None) -> None:
        """Make a collection that is not there yet."""
        if collection in self._made:
            return
        if not self.do(lambda client: client.collection_exists(collection)):
            self._create(collection, dimensions)
        self._made.add(collection)

    def close(self) -> None:
        """Give up all connections."""
        self._client.close()

    def _create(self, collection: str, dimensions: int | None) -> None:
        models = self.models
        vectors: Any = {}
        if dimensions is not None:
            vectors = models.VectorParams(
                size=dimensions, distance=models.Distance.COSINE, datatype=models.Datatype.FLOAT16
            )

        def create(client: Any) -> None:
            try:
                client.create_collection(collection, vectors_config=vectors)
            except self._errors.UnexpectedResponse as error:
                if error.status_code != _CONFLICT:  # else another process was faster
                    raise
            for id in ("scope", "engine", "tenant"):
                client.create_payload_index(collection, id, models.PayloadSchemaType.KEYWORD)
            client.create_payload_index(collection, "created", models.PayloadSchemaType.FLOAT)

        self.do(create)
