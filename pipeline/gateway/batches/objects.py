"""Files and batches as OpenAI's clients see them, and the lines of their files (openai-python 3.54, `types.batch`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from pipeline.gateway.bounds import Label, Metadata

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
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
    """What is wrong with a line of an input file."""

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
    def of(cls, found: Sequence[FileObject | BatchObject], limit: int) -> Page[Any]:
        """Make a page of at most `limit` objects.

        Args:
            found: one more than that, if there is one more.
            limit: of the page.
        """
        shown = found[:limit]
        first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
        return Page[Any](data=list(shown), first_id=first, last_id=last, has_more=len(found) > limit)
