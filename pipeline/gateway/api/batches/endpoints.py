"""/v1/files and /v1/batches: many requests in one file, answered beside those of clients within a day."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from pipeline.gateway.api.batches.objects import (
    FINAL,
    MESSAGE_BATCH_PREFIX,
    WINDOW_S,
    BatchObject,
    BatchRequest,
    ExpiresAfter,
    FileDeleted,
    FileObject,
    Page,
)
from pipeline.gateway.api.batches.runner import BatchRunner
from pipeline.gateway.api.batches.storage import no_batch
from pipeline.gateway.api.parsing import parse_request, validate_request
from pipeline.gateway.context import EndpointFamily, GatewayContext
from pipeline.gateway.database import disk_errors
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant
from pipeline.gateway.web import ApiRoute, json_answer

_FILE, _BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
_FORM_BYTES = 64 * 1024  # bytes of a form besides its file
_UPLOADS_OF_TENANT = 4  # at once: each takes room on the disk before it is known whether it may be kept
_PART_BYTES = 256 * 1024  # bytes of a file that are read at once
_MAX_NAME = 255  # characters of a file's name


class FileQuery(BaseModel):
    """Query of GET /v1/files."""

    after: str | None = None
    limit: int = Field(default=10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class FileForm(BaseModel):
    """Form of POST /v1/files, besides its file."""

    model_config = ConfigDict(extra="forbid")
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileEndpoints(EndpointFamily):
    """Files."""

    def __init__(self, context: GatewayContext) -> None:
        super().__init__(context)
        self._uploads: Counter[str] = Counter()  # under way, by tenant

    @ApiRoute("POST", "/v1/files", "Upload a file for a batch.", form=FileForm, response=FileObject)
    async def _upload(self, request: Request) -> Response:
        tenant = await self.context.authenticate(request)
        limited = _limited(request, self.context.batch_storage.limits.file_bytes)
        with disk_errors("the folder of temporary files"), self._uploading(tenant):
            async with limited.form(max_files=1, max_fields=8) as form:
                fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
                parsed, upload = validate_request(FileForm, _nested(fields)), form.get("file")
                if not isinstance(upload, UploadFile):
                    raise ApiError(400, "file: is missing", param="file")
                if len(upload.filename or "") > _MAX_NAME:
                    raise ApiError(400, f"file: its name has more than {_MAX_NAME} characters", param="file")
                expires_s = None if parsed.expires_after is None else parsed.expires_after.seconds
                file = await self.context.use_state(
                    self.context.batch_storage.add_file,
                    tenant.name,
                    upload.file,
                    upload.filename or "file",
                    expires_s,
                )
        return json_answer(file)

    @contextmanager
    def _uploading(self, tenant: Tenant) -> Iterator[None]:
        if self._uploads[tenant.name] >= _UPLOADS_OF_TENANT:
            text = f"{_UPLOADS_OF_TENANT} files of yours are being uploaded; wait for one"
            raise ApiError(429, text, code="upload_limit", retry_after_s=1)
        self._uploads[tenant.name] += 1
        try:
            yield
        finally:
            self._uploads[tenant.name] -= 1

    @ApiRoute("GET", "/v1/files", "List files.", query=FileQuery, response=Page[FileObject])
    async def _list(self, request: Request) -> Response:
        tenant = await self.context.authenticate(request)
        query = validate_request(FileQuery, dict(request.query_params))
        files = await self.context.use_state(
            self.context.batch_storage.files,
            tenant.name,
            after=query.after,
            limit=query.limit + 1,
            newest_first=query.order == "desc",
            purpose=query.purpose,
        )
        return json_answer(Page.of(files, query.limit))

    @ApiRoute("GET", _FILE, "Describe a file.", response=FileObject)
    async def _show(self, request: Request) -> Response:
        tenant = await self.context.authenticate(request)
        return json_answer(
            await self.context.use_state(
                self.context.batch_storage.file, tenant.name, request.path_params["file_id"]
            )
        )

    @ApiRoute("DELETE", _FILE, "Delete a file.", response=FileDeleted)
    async def _delete(self, request: Request) -> Response:
        tenant, id = await self.context.authenticate(request), request.path_params["file_id"]
        await self.context.use_state(self.context.batch_storage.delete_file, tenant.name, id)
        return json_answer(FileDeleted(id=id))

    @ApiRoute("GET", f"{_FILE}/content", "Read a file.", media_type="application/octet-stream")
    async def _content(self, request: Request) -> Response:
        tenant, id = await self.context.authenticate(request), request.path_params["file_id"]
        file = await self.context.use_state(self.context.batch_storage.file, tenant.name, id)
        content = await self.context.use_state(self.context.batch_storage.open_content, tenant.name, id)
        # Never shown by a browser: a file may hold anything, and the origin is that of the gateway's page.
        headers = {
            "content-disposition": f"attachment; filename*=utf-8''{quote(file.filename)}",
            "content-length": str(file.bytes),
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(self._parts(content), headers=headers, media_type="application/octet-stream")

    async def _parts(self, content: BinaryIO) -> AsyncIterator[bytes]:
        try:
            while part := await self.context.use_state(content.read, _PART_BYTES):
                yield part
        finally:
            # Not here: a read that nobody waits for any more may still hold it.
            self.context.state_threads.submit(content.close)


def _limited(request: Request, most: int) -> Request:
    """The same request, which fails once its body is too large, late or cut off."""
    received = 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "The client left before it had sent the whole file", code="client_left")
        if request.scope.get("late"):
            raise ApiError(408, "The file did not come in time", code="request_timeout")
        received += len(message.get("body", b""))
        if received > most + _FORM_BYTES:
            raise ApiError(413, f"The file is larger than {most} bytes", param="file", code="file_too_large")
        return message

    return Request(request.scope, receive)


def _nested(fields: dict[str, str]) -> dict[str, Any]:
    """Fields of a form with those of objects gathered: `a[b]` is `b` of `a`, as OpenAI's clients send them."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        outer, bracket, inner = name.partition("[")
        if bracket and inner.endswith("]"):
            members = nested.setdefault(outer, {})
            if not isinstance(members, dict):
                raise ApiError(400, f"{outer[:64]}: is given as a text and as an object", param=outer)
            members[inner[:-1]] = value
        else:
            nested[name] = value
    return nested


class BatchQuery(BaseModel):
    """Query of GET /v1/batches."""

    after: str | None = None
    limit: int = Field(default=20, ge=1, le=100)


class BatchEndpoints(EndpointFamily):
    """Batches, and what runs them."""

    def __init__(self, context: GatewayContext) -> None:
        super().__init__(context)
        self._runner = None if context.batches is None else BatchRunner(context.batches, context)

    async def start(self) -> None:
        if self._runner is not None:
            self._runner.start()

    async def aclose(self) -> None:
        if self._runner is not None:
            await self._runner.aclose()
            self.context.batch_storage.close()

    @ApiRoute(
        "POST", "/v1/batches", "Make a batch of the requests in a file.", request=BatchRequest, response=BatchObject
    )  # fmt: skip
    async def _create(self, request: Request) -> Response:
        tenant, storage = await self.context.authenticate(request), self.context.batch_storage
        body = parse_request(BatchRequest, await self.context.receive_body(request))
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(12)}", endpoint=body.endpoint, input_file_id=body.input_file_id,
            created_at=now, expires_at=now + WINDOW_S, metadata=body.metadata,
        )  # fmt: skip
        expires_s = None if body.output_expires_after is None else body.output_expires_after.seconds
        stored = await self.context.use_state(storage.add_batch, tenant.name, batch, expires_s)
        self._wake()
        return json_answer(stored)

    @ApiRoute("GET", "/v1/batches", "List batches.", query=BatchQuery, response=Page[BatchObject])
    async def _list(self, request: Request) -> Response:
        tenant = await self.context.authenticate(request)
        query = validate_request(BatchQuery, dict(request.query_params))
        batches = await self.context.use_state(
            self.context.batch_storage.batches, tenant.name, after=query.after, limit=query.limit + 1
        )
        return json_answer(Page.of(batches, query.limit))

    @ApiRoute("GET", _BATCH, "Describe a batch.", response=BatchObject)
    async def _show(self, request: Request) -> Response:
        tenant = await self.context.authenticate(request)
        return json_answer(
            await self.context.use_state(self.context.batch_storage.batch, tenant.name, _batch_id(request))
        )

    @ApiRoute("POST", f"{_BATCH}/cancel", "Cancel a batch.", response=BatchObject)
    async def _cancel(self, request: Request) -> Response:
        tenant, id = await self.context.authenticate(request), _batch_id(request)

        def cancel(batch: BatchObject) -> BatchObject:
            if batch.status in (*FINAL, "finalizing"):
                text = f"Cannot cancel a batch with status '{batch.status}'."
                raise ApiError(409, text, code="batch_not_cancellable")
            return batch if batch.status == "cancelling" else batch.entered("cancelling", time.time())

        cancelled = await self.context.use_state(self.context.batch_storage.change, tenant.name, id, cancel)
        self._wake()
        return json_answer(cancelled)

    def _wake(self) -> None:
        assert self._runner is not None
        self._runner.wake()


def _batch_id(request: Request) -> str:
    """The id of a batch; 404 for that of a message batch, which is Anthropic's."""
    id = str(request.path_params["batch_id"])
    if id.startswith(MESSAGE_BATCH_PREFIX):
        raise no_batch(id)
    return id
