"""Files and batches as OpenAI's clients see them (openai-python 3.54, `types.batch`), and input files of batches.

The lines of an input file are read one at a time, and checked before the first request is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.gateway.api.bounds import Label, Metadata
from pipeline.gateway.api.parsing import check_json
from pipeline.gateway.errors import ApiError

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
WINDOW_S = 24 * 3600  # from the making of a batch until it expires
MESSAGES: Literal["/v1/messages"] = "/v1/messages"
MESSAGE_BATCH_PREFIX = "msgbatch_"  # beginning of their ids
# Code of a request that had no answer when the time of its batch was over.
EXPIRED = "batch_expired"
# No batch leaves these.
FINAL: tuple[BatchStatus, ...] = ("failed", "completed", "expired", "cancelled")
BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
_Listed = TypeVar("_Listed")


class ExpiresAfter(BaseModel):
    """How long a file is kept."""

    model_config = ConfigDict(extra="forbid")
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class FileObject(BaseModel):
    """A file that was uploaded, or that a batch ended in."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileDeleted(BaseModel):
    """Answer to DELETE /v1/files/{id}."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchRequest(BaseModel):
    """Body of POST /v1/batches."""

    model_config = ConfigDict(extra="forbid")
    input_file_id: str = Field(max_length=64)
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchFault(BaseModel):
    """Fault of a line of an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(BaseModel):
    """Why a batch failed before any of its requests was asked."""

    object: Literal["list"] = "list"
    data: list[BatchFault]


class RequestCounts(BaseModel):
    """How many requests of a batch are over."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(BaseModel):
    """A batch. Times are seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    # That of message batches, which OpenAI's API does not show, is none of its own.
    endpoint: BatchEndpoint | Literal["/v1/messages"]
    model: str | None = None
    errors: BatchFaults | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

    def entered(self, status: BatchStatus, now: float, **changed: Any) -> Self:
        """Return the batch in another state, with the time at which it came there."""
        return self.model_copy(update={"status": status, f"{status}_at": int(now), **changed})


class BatchLine(BaseModel):
    """A line of an input file: one request."""

    model_config = ConfigDict(extra="forbid")
    custom_id: Label = Field(min_length=1)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class Page(BaseModel, Generic[_Listed]):
    """One page of a list; the next one begins after `last_id`."""

    object: Literal["list"] = "list"
    data: list[_Listed]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False

    @classmethod
    def of(cls, objects: Sequence[FileObject | BatchObject], limit: int) -> Page[Any]:
        """Make a page of at most `limit` of `objects`, which are one more if there is one more."""
        shown = objects[:limit]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        return Page[Any](data=list(shown), first_id=first, last_id=last, has_more=len(objects) > limit)


_MAX_REQUESTS = 50_000
_MAX_LINES = 2 * _MAX_REQUESTS  # with empty lines
_MAX_FAULTS = 100  # faults in one answer
_MAX_QUOTED = 64  # characters of the file in the message of a fault


class InputFile:
    """The requests of a batch, one a line; lines without text are none. Safe to call from any thread."""

    def __init__(self, file: BinaryIO, max_line_bytes: int) -> None:
        """Find where each line begins, as far as the file keeps its limits; `check` tells where it does not.

        Args:
            file: file that is read from where it is, and closed by `close`.
            max_line_bytes: most bytes of a line, with its end.
        """
        self._file, self._lock = file, threading.Lock()
        self._spans: list[tuple[int, int, int]] = []  # first byte, bytes, number of the line from 1
        self._beyond: BatchFault | None = None  # the limit at which reading stopped
        at, number = 0, 1
        while line := file.readline(max_line_bytes + 1):
            if len(line) > max_line_bytes:
                text = f"The line has more than {max_line_bytes} bytes."
                self._beyond = BatchFault(code="line_too_large", message=text, line=number)
                break
            if not line.isspace():
                self._spans.append((at, len(line), number))
            if len(self._spans) > _MAX_REQUESTS or number > _MAX_LINES:
                text = f"A batch has at most {_MAX_REQUESTS} requests, and its file {_MAX_LINES} lines."
                self._beyond = BatchFault(code="too_many_requests", message=text)
                break
            at, number = at + len(line), number + 1

    def __len__(self) -> int:
        return len(self._spans)

    def read(self, index: int) -> BatchLine:
        """Return a request that `check` has found right, by its number from 0."""
        at, size, _ = self._spans[index]
        return BatchLine.model_validate_json(self._read(at, size))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _read(self, at: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(at)
            return self._file.read(size)

    def check(self, endpoint: str, models: Sequence[str]) -> tuple[str | None, list[BatchFault]]:
        """Check all requests of a batch of `endpoint`, each of which may name one of `models`.

        Returns:
            The model that all requests name, and the first hundred faults.
        """
        if self._beyond is not None:
            return None, [self._beyond]
        if not self._spans:
            return None, [BatchFault(code="empty_file", message="The file has no requests.")]
        faults: list[BatchFault] = []
        first_lines: dict[str, int] = {}
        model: str | None = None
        for at, size, number in self._spans:
            request = self._read(at, size)
            try:
                check_json(request)
                line = BatchLine.model_validate_json(request)
            except ApiError as error:
                faults.append(BatchFault(code="invalid_request", message=error.message, line=number))
            except ValidationError as error:
                faults += _faults_of_form(error, number)
            else:
                named = line.body.get("model")
                model = model or (named if isinstance(named, str) else None)
                faults += self._faults_of(line, number, endpoint, model, models)
                if (first := first_lines.setdefault(line.custom_id, number)) != number:
                    text = f"The custom_id {line.custom_id!r} is that of line {first}, too."
                    faults.append(
                        BatchFault(code="duplicate_custom_id", message=text, line=number, param="custom_id")
                    )
            if len(faults) >= _MAX_FAULTS:
                break
            # Lets the event loop, which waits for the interpreter's lock, go on with its streams.
            time.sleep(0)
        return model, faults[:_MAX_FAULTS]

    def _faults_of(
        self, line: BatchLine, number: int, endpoint: str, model: str | None, models: Sequence[str]
    ) -> Iterator[BatchFault]:
        named = line.body.get("model")
        if line.url != endpoint:
            text = f"The url {_quoted(line.url)} is not the endpoint of the batch, {endpoint}."
            yield BatchFault(code="mismatched_endpoint", message=text, line=number, param="url")
        if not isinstance(named, str):
            text = "body.model must be the name of a model."
            yield BatchFault(code="invalid_request", message=text, line=number, param="body.model")
        elif named != model:
            text = f"The model {_quoted(named)} is not that of the first request, {_quoted(model)}: a batch has one."
            yield BatchFault(code="mismatched_model", message=text, line=number, param="body.model")
        elif named not in models:
            text = f"The model {_quoted(named)} does not exist; there are: {', '.join(models)}."
            yield BatchFault(code="model_not_found", message=text, line=number, param="body.model")
        if line.body.get("stream"):
            text = "No answer of a batch is streamed: leave out body.stream."
            yield BatchFault(code="invalid_request", message=text, line=number, param="body.stream")


def _quoted(text: str | None) -> str:
    return repr(text if text is None else text[:_MAX_QUOTED])


def _faults_of_form(error: ValidationError, number: int) -> Iterator[BatchFault]:
    for fault in error.errors(include_url=False, include_input=False):
        place = ".".join(map(str, fault["loc"]))[:_MAX_QUOTED]
        kind = "invalid_json_line" if fault["type"] == "json_invalid" else "invalid_request"
        text = f"{place}: {fault['msg']}" if place else fault["msg"]
        yield BatchFault(code=kind, message=text, line=number, param=place or None)
