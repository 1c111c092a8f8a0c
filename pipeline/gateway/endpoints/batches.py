"""/v1/batches: many requests in one file, answered beside those of clients within a day."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from pipeline.gateway.batches.messages import ID_PREFIX
from pipeline.gateway.batches.objects import FINAL, BatchObject, BatchRequest, Page
from pipeline.gateway.batches.runner import BatchRunner
from pipeline.gateway.batches.storage import BatchStorage, no_batch
from pipeline.gateway.context import GatewayContext
from pipeline.gateway.endpoints.endpoint import ApiEndpoint, EndpointFamily, json_answer
from pipeline.gateway.errors import ApiError
from pipeline.gateway.parsing import parse_request, validate_request

WINDOW_S = 24 * 3600


class BatchQuery(BaseModel):
    """Query of GET /v1/batches."""

    after: str | None = None
    limit: int = Field(default=20, ge=1, le=100)


class BatchEndpoints(EndpointFamily):
    """Batches, and what runs them."""

    def __init__(self, context: GatewayContext) -> None:
        super().__init__(context)
        self._runner = None if context.batches is None else BatchRunner(context.batches, context)

    def endpoints(self) -> Sequence[ApiEndpoint]:
        one = "/v1/batches/{batch_id}"
        return (
            ApiEndpoint(
                "POST", "/v1/batches", self._create, "Make a batch of the requests in a file.",
                request=BatchRequest, response=BatchObject,
            ),
            ApiEndpoint(
                "GET", "/v1/batches", self._list, "List batches.", query=BatchQuery, response=Page[BatchObject]
            ),
            ApiEndpoint("GET", one, self._show, "Describe a batch.", response=BatchObject),
            ApiEndpoint("POST", f"{one}/cancel", self._cancel, "Cancel a batch.", response=BatchObject),
        )  # fmt: skip

    async def start(self) -> None:
        if self._runner is not None:
            self._runner.start()

    async def aclose(self) -> None:
        if self._runner is not None:
            await self._runner.aclose()
            self._storage.close()

    @property
    def _storage(self) -> BatchStorage:
        return self.context.batch_storage

    async def _create(self, request: Request) -> Response:
        tenant, storage = await self.context.authenticate(request), self._storage
        asked = parse_request(BatchRequest, await self.context.receive_body(request))
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(12)}", endpoint=asked.endpoint, input_file_id=asked.input_file_id,
            created_at=now, expires_at=now + WINDOW_S, metadata=asked.metadata,
        )  # fmt: skip
        expires_s = None if asked.output_expires_after is None else asked.output_expires_after.seconds
        made = await self.context.use_state(storage.add_batch, tenant.name, batch, expires_s)
        self._wake()
        return json_answer(made)

    async def _list(self, request: Request) -> Response:
        tenant = await self.context.authenticate(request)
        query = validate_request(BatchQuery, dict(request.query_params))
        found = await self.context.use_state(
            self._storage.batches, tenant.name, after=query.after, limit=query.limit + 1
        )
        return json_answer(Page.of(found, query.limit))

    async def _show(self, request: Request) -> Response:
        tenant = await self.context.authenticate(request)
        return json_answer(await self.context.use_state(self._storage.batch, tenant.name, _id(request)))

    async def _cancel(self, request: Request) -> Response:
        tenant, id = await self.context.authenticate(request), _id(request)

        def cancel(batch: BatchObject) -> BatchObject:
            if batch.status in (*FINAL, "finalizing"):
                text = f"Cannot cancel a batch with status '{batch.status}'."
                raise ApiError(409, text, code="batch_not_cancellable")
            return batch if batch.status == "cancelling" else batch.entered("cancelling", time.time())

        cancelled = await self.context.use_state(self._storage.change, tenant.name, id, cancel)
        self._wake()
        return json_answer(cancelled)

    def _wake(self) -> None:
        assert self._runner is not None
        self._runner.wake()


def _id(request: Request) -> str:
    """The id of a batch; 404 for that of a message batch, which is Anthropic's."""
    id = str(request.path_params["batch_id"])
    if id.startswith(ID_PREFIX):
        raise no_batch(id)
    return id
