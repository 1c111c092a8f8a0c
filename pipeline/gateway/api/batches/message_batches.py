"""/v1/messages/batches: message batches of Anthropic's API, made of the same files and batches as OpenAI's.

A message batch is a batch of `/v1/messages`, with an id of its own kind: neither API sees the batches of the other. Its
requests are its input file; its results are made of its output and error files. Written against anthropic-python 2.14
(`types.messages`).
"""

from __future__ import annotations

import io
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from pipeline.gateway.api.batches.objects import (
    EXPIRED,
    FINAL,
    MESSAGE_BATCH_PREFIX,
    MESSAGES,
    WINDOW_S,
    BatchObject,
    InputFile,
    RequestCounts,
)
from pipeline.gateway.api.batches.storage import BatchStorage, no_batch
from pipeline.gateway.api.bounds import MAX_FAULTS
from pipeline.gateway.api.models import AnthropicPageQuery, list_page, rfc3339
from pipeline.gateway.api.parsing import parse_request, raise_faults, validate_request
from pipeline.gateway.context import EndpointFamily
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant
from pipeline.gateway.web import ApiRoute

_BATCHES = f"{MESSAGES}/batches"
_BATCH = f"{_BATCHES}/{{batch_id}}"
_LINE_BYTES = 2**26  # bytes of a request; the body of the batch is bounded
_RESULTS_S = 29 * 24 * 3600
_RESULT_LINES = 64  # lines read at once


class MessageBatchItem(BaseModel):
    """One request of a message batch. Faults in its parameters are reported in its result."""

    model_config = ConfigDict(extra="forbid")
    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchRequest(BaseModel):
    """Body of POST /v1/messages/batches."""

    model_config = ConfigDict(extra="forbid")
    requests: Annotated[list[MessageBatchItem], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        first: dict[str, int] = {}
        faults = [
            f"requests.{index}.custom_id: is that of requests.{first[item.custom_id]}, too"
            for index, item in enumerate(self.requests)
            if first.setdefault(item.custom_id, index) != index
        ]
        raise_faults(faults, "requests")
        return self

    def input_file(self, models: Sequence[str]) -> tuple[io.BytesIO, str]:
        """Return the input file of the batch, and the model that all requests name, one of `models`.

        Raises:
            ApiError: 400; a request names no model, a model that is not there or not that of the first, or a stream.
        """
        lines = (
            {"custom_id": item.custom_id, "method": "POST", "url": MESSAGES, "body": item.params}
            for item in self.requests
        )
        content = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        model, faults = InputFile(content, _LINE_BYTES).check(MESSAGES, models)
        if faults or model is None:
            texts = [
                f"requests.{(fault.line or 1) - 1}: {fault.message.replace('body.', 'params.')}"
                for fault in faults[:MAX_FAULTS]
            ]
            raise ApiError(400, "; ".join(texts), param="requests")
        return content, model


def message_batch(batch: BatchObject, base_url: str, storage: BatchStorage, tenant: str) -> dict[str, Any]:
    """Return Anthropic's object of a batch of a tenant; the URL of the server ends with a slash."""
    ended, counts = batch.status in FINAL, batch.request_counts
    unanswered = counts.total - counts.completed - counts.failed
    expired = _count_expired(batch, storage, tenant) if batch.status == "expired" else 0
    counted = {"processing": counts.total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if ended:
        counted = {
            "processing": 0, "succeeded": counts.completed, "expired": expired,
            "errored": counts.failed - expired + (unanswered if batch.status == "failed" else 0),
            "canceled": unanswered if batch.status == "cancelled" else 0,
        }  # fmt: skip
    ends = (batch.completed_at, batch.cancelled_at, batch.expired_at, batch.failed_at)
    status = "ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counted,
        "created_at": rfc3339(batch.created_at),
        "expires_at": rfc3339(batch.expires_at),
        "ended_at": next((rfc3339(end) for end in ends if ended and end is not None), None),
        "cancel_initiated_at": None if batch.cancelling_at is None else rfc3339(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{base_url}v1/messages/batches/{batch.id}/results" if ended else None,
    }


def results(batch: BatchObject, storage: BatchStorage, tenant: str) -> Iterator[bytes]:
    """Read the results of a batch that has ended, one line of JSON for each request.

    Raises:
        ApiError: 404, if its files were deleted.
    """
    with storage.open_content(tenant, batch.input_file_id) as file:
        unanswered = dict.fromkeys(json.loads(line)["custom_id"] for line in file)
    for id in (batch.output_file_id, batch.error_file_id):
        if id is None:
            continue
        with storage.open_content(tenant, id) as file:
            for text in file:
                line = json.loads(text)
                unanswered.pop(line["custom_id"], None)
                yield _result_line(line["custom_id"], _result(line))
    # Requests without an answer: of a batch that was cancelled, or whose model is gone.
    missing: dict[str, Any] = {"type": "canceled"}
    if batch.status == "failed":
        faults = [] if batch.errors is None else [fault.message for fault in batch.errors.data]
        missing = _errored(ApiError(400, "; ".join(faults[:MAX_FAULTS])).anthropic_body())
    for custom_id in unanswered:
        yield _result_line(custom_id, missing)


def _result(line: dict[str, Any]) -> dict[str, Any]:
    """The result of a request, by its line in the output or error file."""
    response, error = line["response"], line["error"]
    if response is None:
        if error["code"] == EXPIRED:
            return {"type": "expired"}
        return _errored(ApiError(500, error["message"]).anthropic_body(line["id"].removeprefix("batch_req_")))
    if response["status_code"] >= 300:
        return _errored(response["body"])
    return {"type": "succeeded", "message": response["body"]}


def _errored(error: dict[str, Any]) -> dict[str, Any]:
    return {"type": "errored", "error": error}


def _result_line(custom_id: str, result: dict[str, Any]) -> bytes:
    return json.dumps({"custom_id": custom_id, "result": result}, ensure_ascii=False).encode() + b"\n"


def _count_expired(batch: BatchObject, storage: BatchStorage, tenant: str) -> int:
    if batch.error_file_id is None:
        return 0
    try:
        with storage.open_content(tenant, batch.error_file_id) as file:
            return sum(_result(json.loads(line)) == {"type": "expired"} for line in file)
    except ApiError:
        # The file was deleted.
        return batch.request_counts.failed


class MessageBatchEndpoints(EndpointFamily):
    """Message batches; `BatchEndpoints` runs them."""

    @ApiRoute("POST", _BATCHES, "Make a message batch, as Anthropic's API does.", request=MessageBatchRequest)
    async def _create(self, request: Request) -> Response:
        context, storage = self.context, self.context.batch_storage
        tenant = await context.authenticate(request)
        body = await context.receive_body(request)
        batch_request = await context.parsers.run(
            lambda: parse_request(MessageBatchRequest, body), request, len(body), tenant
        )
        id, now = f"{MESSAGE_BATCH_PREFIX}{secrets.token_hex(12)}", int(time.time())
        names = context.model_names()

        def make() -> BatchObject:
            content, model = batch_request.input_file(names)
            file = storage.add_file(tenant.name, content, f"{id}_input.jsonl")
            batch = BatchObject(
                id=id, endpoint=MESSAGES, input_file_id=file.id, model=model, created_at=now,
                expires_at=now + WINDOW_S, request_counts=RequestCounts(total=len(batch_request.requests)),
            )  # fmt: skip
            try:
                return storage.add_batch(tenant.name, batch, _RESULTS_S)
            except ApiError:
                storage.delete_file(tenant.name, file.id)
                raise

        return await self._described(request, tenant, make)

    @ApiRoute("GET", _BATCHES, "List message batches.", query=AnthropicPageQuery)
    async def _list(self, request: Request) -> Response:
        tenant, storage = await self.context.authenticate(request), self.context.batch_storage
        query = validate_request(AnthropicPageQuery, dict(request.query_params))

        def page() -> dict[str, Any]:
            batches = storage.batches(
                tenant.name,
                prefix=MESSAGE_BATCH_PREFIX,
                after=query.after_id,
                before=query.before_id,
                limit=query.limit + 1,
            )
            shown = batches[-query.limit :] if query.before_id is not None else batches[: query.limit]
            data = [message_batch(batch, str(request.base_url), storage, tenant.name) for batch in shown]
            return list_page(data, has_more=len(batches) > query.limit)

        return JSONResponse(await self.context.use_state(page))

    @ApiRoute("GET", _BATCH, "Describe a message batch.")
    async def _show(self, request: Request) -> Response:
        tenant, id = await self.context.authenticate(request), _id(request)
        return await self._described(
            request, tenant, partial(self.context.batch_storage.batch, tenant.name, id)
        )

    @ApiRoute("POST", f"{_BATCH}/cancel", "Cancel a message batch.")
    async def _cancel(self, request: Request) -> Response:
        tenant, id = await self.context.authenticate(request), _id(request)

        def cancel(batch: BatchObject) -> BatchObject:
            if batch.status in FINAL:
                raise ApiError(400, f"Batch {batch.id} cannot be canceled: it has ended.", param="id")
            running = batch.status not in ("cancelling", "finalizing")
            return batch.entered("cancelling", time.time()) if running else batch

        change = partial(self.context.batch_storage.change, tenant.name, id, cancel)
        return await self._described(request, tenant, change)

    async def _described(self, request: Request, tenant: Tenant, call: Callable[[], BatchObject]) -> Response:
        """Answer with the message batch that a call returns."""
        storage = self.context.batch_storage

        def describe() -> dict[str, Any]:
            return message_batch(call(), str(request.base_url), storage, tenant.name)

        return JSONResponse(await self.context.use_state(describe))

    @ApiRoute("DELETE", _BATCH, "Delete a message batch that has ended.")
    async def _delete(self, request: Request) -> Response:
        tenant, id = await self.context.authenticate(request), _id(request)
        storage = self.context.batch_storage

        def delete() -> None:
            batch = storage.delete_batch(tenant.name, id)
            for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                if file is not None:
                    # It may have been deleted before.
                    with suppress(ApiError):
                        storage.delete_file(tenant.name, file)

        await self.context.use_state(delete)
        return JSONResponse({"id": id, "type": "message_batch_deleted"})

    @ApiRoute(
        "GET", f"{_BATCH}/results", "Read the results of a message batch.", media_type="application/x-jsonl"
    )
    async def _results(self, request: Request) -> Response:
        tenant, id = await self.context.authenticate(request), _id(request)
        storage = self.context.batch_storage
        batch = await self.context.use_state(storage.batch, tenant.name, id)
        if batch.status not in FINAL:
            text = f"Batch {id} has no results yet: its processing_status is in_progress or canceling."
            raise ApiError(404, text, param="id")
        lines = results(batch, storage, tenant.name)
        # What is not there any more is a 404, not half an answer.
        first = await self.context.use_state(next, lines, b"")

        def next_part() -> bytes:
            return b"".join(islice(lines, _RESULT_LINES))

        async def parts() -> AsyncIterator[bytes]:
            part = first
            while part:
                yield part
                part = await self.context.use_state(next_part)

        return StreamingResponse(parts(), media_type="application/x-jsonl")


def _id(request: Request) -> str:
    """Id of a message batch; 404 for that of another batch, which is OpenAI's."""
    id = str(request.path_params["batch_id"])
    if not id.startswith(MESSAGE_BATCH_PREFIX):
        raise no_batch(id)
    return id
