"""/v1/messages/batches: message batches as Anthropic's clients make and read them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from pipeline.gateway.anthropic_models import AnthropicPageQuery
from pipeline.gateway.batches.messages import (
    ID_PREFIX,
    MESSAGES,
    MessageBatchRequest,
    message_batch,
    results,
)
from pipeline.gateway.batches.objects import FINAL, BatchObject, RequestCounts
from pipeline.gateway.batches.storage import BatchStorage, no_batch
from pipeline.gateway.endpoints.batches import WINDOW_S
from pipeline.gateway.endpoints.endpoint import ApiEndpoint, EndpointFamily
from pipeline.gateway.errors import ApiError
from pipeline.gateway.parsing import parse_request, validate_request

_RESULTS_S = 29 * 24 * 3600
_RESULT_LINES = 64  # that are read at once


class MessageBatchEndpoints(EndpointFamily):
    """Message batches; `BatchEndpoints` runs them."""

    def endpoints(self) -> Sequence[ApiEndpoint]:
        all_of_them = f"{MESSAGES}/batches"
        one = f"{all_of_them}/{{batch_id}}"
        return (
            ApiEndpoint(
                "POST", all_of_them, self._create, "Make a message batch, as Anthropic's API does.",
                request=MessageBatchRequest,
            ),
            ApiEndpoint("GET", all_of_them, self._list, "List message batches.", query=AnthropicPageQuery),
            ApiEndpoint("GET", one, self._show, "Describe a message batch."),
            ApiEndpoint("DELETE", one, self._delete, "Delete a message batch that has ended."),
            ApiEndpoint("POST", f"{one}/cancel", self._cancel, "Cancel a message batch."),
            ApiEndpoint(
                "GET", f"{one}/results", self._results, "Read the results of a message batch.",
                media_type="application/x-jsonl",
            ),
        )  # fmt: skip

    @property
    def _storage(self) -> BatchStorage:
        return self.context.batch_storage

    async def _create(self, request: Request) -> Response:
        context, storage = self.context, self._storage
        tenant = await context.authenticate(request)
        body = await context.receive_body(request)
        asked = await context.parsers.run(
            lambda: parse_request(MessageBatchRequest, body), request, len(body), tenant
        )
        id, now, names = f"{ID_PREFIX}{secrets.token_hex(12)}", int(time.time()), context.model_names()

        def make() -> dict[str, Any]:
            content, model = asked.input_file(names)
            file = storage.add_file(tenant.name, content, f"{id}_input.jsonl")
            batch = BatchObject(
                id=id, endpoint=MESSAGES, input_file_id=file.id, model=model, created_at=now,
                expires_at=now + WINDOW_S, request_counts=RequestCounts(total=len(asked.requests)),
            )  # fmt: skip
            try:
                made = storage.add_batch(tenant.name, batch, _RESULTS_S)
            except ApiError:
                storage.delete_file(tenant.name, file.id)
                raise
            return message_batch(made, str(request.base_url), storage, tenant.name)

        return JSONResponse(await context.use_state(make))

    async def _list(self, request: Request) -> Response:
        tenant, storage = await self.context.authenticate(request), self._storage
        query = validate_request(AnthropicPageQuery, dict(request.query_params))

        def page() -> dict[str, Any]:
            found = storage.batches(
                tenant.name, prefix=ID_PREFIX, after=query.after_id, before=query.before_id, limit=query.limit + 1
            )  # fmt: skip
            shown = found[-query.limit :] if query.before_id is not None else found[: query.limit]
            data = [message_batch(one, str(request.base_url), storage, tenant.name) for one in shown]
            first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
            return {"data": data, "has_more": len(found) > query.limit, "first_id": first, "last_id": last}

        return JSONResponse(await self.context.use_state(page))

    async def _show(self, request: Request) -> Response:
        tenant, storage = await self.context.authenticate(request), self._storage

        def show() -> dict[str, Any]:
            return message_batch(
                storage.batch(tenant.name, _id(request)), str(request.base_url), storage, tenant.name
            )

        return JSONResponse(await self.context.use_state(show))

    async def _cancel(self, request: Request) -> Response:
        tenant, storage = await self.context.authenticate(request), self._storage

        def cancel(batch: BatchObject) -> BatchObject:
            if batch.status in FINAL:
                raise ApiError(400, f"Batch {batch.id} cannot be canceled: it has ended.", param="id")
            running = batch.status not in ("cancelling", "finalizing")
            return batch.entered("cancelling", time.time()) if running else batch

        def change() -> dict[str, Any]:
            changed = storage.change(tenant.name, _id(request), cancel)
            return message_batch(changed, str(request.base_url), storage, tenant.name)

        return JSONResponse(await self.context.use_state(change))

    async def _delete(self, request: Request) -> Response:
        tenant, storage, id = await self.context.authenticate(request), self._storage, _id(request)

        def delete() -> None:
            batch = storage.delete_batch(tenant.name, id)
            for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                if file is not None:
                    # It may have been deleted before.
                    with suppress(ApiError):
                        storage.delete_file(tenant.name, file)

        await self.context.use_state(delete)
        return JSONResponse({"id": id, "type": "message_batch_deleted"})

    async def _results(self, request: Request) -> Response:
        tenant, storage, id = await self.context.authenticate(request), self._storage, _id(request)
        batch = await self.context.use_state(storage.batch, tenant.name, id)
        if batch.status not in FINAL:
            text = f"Batch {id} has no results yet: its processing_status is in_progress or canceling."
            raise ApiError(404, text, param="id")
        lines = results(batch, storage, tenant.name)
        # What is not there any more is a 404, not half an answer.
        first = await self.context.use_state(next, lines, b"")

        def some() -> bytes:
            return b"".join(islice(lines, _RESULT_LINES))

        async def parts() -> AsyncIterator[bytes]:
            part = first
            while part:
                yield part
                part = await self.context.use_state(some)

        return StreamingResponse(parts(), media_type="application/x-jsonl")


def _id(request: Request) -> str:
    """The id of a message batch.

    Raises:
        ApiError: 404, if it is none; a batch of OpenAI's API has another kind of id.
    """
    id = str(request.path_params["batch_id"])
    if not id.startswith(ID_PREFIX):
        raise no_batch(id)
    return id
