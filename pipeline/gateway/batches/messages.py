"""Message batches of Anthropic's API, made of the same files and batches as OpenAI's.

A message batch is a batch of `/v1/messages`, with an id of its own kind: neither API sees the batches of the other. Its
requests are its input file; its results are made of its output and error files. Written against anthropic-python 2.14
(`types.messages`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.gateway.anthropic_models import rfc3339
from pipeline.gateway.batches.input_file import InputFile
from pipeline.gateway.batches.objects import EXPIRED, FINAL, BatchObject
from pipeline.gateway.batches.storage import BatchStorage
from pipeline.gateway.bounds import MAX_FAULTS
from pipeline.gateway.errors import ApiError

MESSAGES: Literal["/v1/messages"] = "/v1/messages"
ID_PREFIX = "msgbatch_"
_LINE_BYTES = 2**26  # of a request; the body of the batch is bounded


class MessageBatchItem(BaseModel):
    """One request of a message batch. What is wrong with its parameters is told in its result."""

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
            f"requests.{index}.custom_id: is that of requests.{first[one.custom_id]}, too"
            for index, one in enumerate(self.requests)
            if first.setdefault(one.custom_id, index) != index
        ]
        if faults:
            raise ApiError(400, "; ".join(faults[:MAX_FAULTS]), param="requests")
        return self

    def input_file(self, models: Sequence[str]) -> tuple[io.BytesIO, str]:
        """Return the input file of the batch, and the model that all requests name.

        Args:
            models: names that a request may have.

        Raises:
            ApiError: 400; a request names no model, another one than the first or one that is not there, or a stream.
        """
        lines = (
            {"custom_id": one.custom_id, "method": "POST", "url": MESSAGES, "body": one.params}
            for one in self.requests
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
    """Return Anthropic's object of a batch.

    Args:
        batch: the batch.
        base_url: URL of this server, with a slash at its end.
        storage: of the batch; it is asked how many requests have expired.
        tenant: tenant of the batch.
    """
    ended, counts = batch.status in FINAL, batch.request_counts
    left = counts.total - counts.completed - counts.failed
    expired = _count_expired(batch, storage, tenant) if batch.status == "expired" else 0
    told = {"processing": counts.total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if ended:
        told = {
            "processing": 0, "succeeded": counts.completed, "expired": expired,
            "errored": counts.failed - expired + (left if batch.status == "failed" else 0),
            "canceled": left if batch.status == "cancelled" else 0,
        }  # fmt: skip
    ends = (batch.completed_at, batch.cancelled_at, batch.expired_at, batch.failed_at)
    status = "ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": told,
        "created_at": rfc3339(batch.created_at),
        "expires_at": rfc3339(batch.expires_at),
        "ended_at": next((rfc3339(one) for one in ends if ended and one is not None), None),
        "cancel_initiated_at": None if batch.cancelling_at is None else rfc3339(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{base_url}v1/messages/batches/{batch.id}/results" if ended else None,
    }


def results(batch: BatchObject, storage: BatchStorage, tenant: str) -> Iterator[bytes]:
    """Read the results of a batch that has ended, one line of JSON for each request.

    Args:
        batch: the batch.
        storage: of the batch.
        tenant: tenant of the batch.

    Raises:
        ApiError: 404, if its files were deleted.
    """
    with storage.open_content(tenant, batch.input_file_id) as file:
        left = dict.fromkeys(json.loads(line)["custom_id"] for line in file)
    for id in (batch.output_file_id, batch.error_file_id):
        if id is None:
            continue
        with storage.open_content(tenant, id) as file:
            for text in file:
                line = json.loads(text)
                left.pop(line["custom_id"], None)
                yield _result_line(line["custom_id"], _result(line))
    # Requests without an answer: of a batch that was cancelled, or whose model is gone.
    rest: dict[str, Any] = {"type": "canceled"}
    if batch.status == "failed":
        faults = [] if batch.errors is None else [fault.message for fault in batch.errors.data]
        rest = _errored(ApiError(400, "; ".join(faults[:MAX_FAULTS])).anthropic_body())
    for custom_id in left:
        yield _result_line(custom_id, rest)


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
