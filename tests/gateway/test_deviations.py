"""Every object, event and error of OpenAI's APIs, held strictly to the types that OpenAI publishes (openai-python).

`KNOWN` has all that is different, each with its reason: a new difference fails, and so does one that is gone. The same
of Anthropic's API: `unknown` in tests/clients/test_anthropic_shapes.py, by Anthropic's own package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import Batch, Completion, FileDeleted, FileObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter, ValidationError

from pipeline.client.testing import Reply
from pipeline.gateway.api.batches.places import BatchFolder
from pipeline.gateway.api.batches.storage import BatchStorage
from tests.gateway.conftest import Running, Start
from tests.gateway.test_gateway_requests import CALLING, HERMES
from tests.support.http_clients import http_client

# Difference -> why it is there. Of a field: "unknown" to the type, or what pydantic says of its value.
KNOWN = {
    "Completion.choices.finish_reason: literal_error": "null in a stream before the last chunk; the type is of answers",
    "ErrorObject.request_id: unknown": "the id under which the log has more, for people who only see the error",
    "Logprob.bytes: unknown": "as in chats; clients that share code with chats read it",
    "LogprobTopLogprob.bytes: unknown": "the same",
    "Model.max_model_len: unknown": "vLLM's; programs size their prompts by it",
    "Model.parent: unknown": "vLLM's; the model that an adapter belongs to",
    "Model.root: unknown": "vLLM's; the own name of a model that an alias names",
    "Response.store: unknown": "whether the response is stored, which a client cannot know otherwise",
    "ResponseFunctionCallArgumentsDoneEvent.name: unknown": "the function, for clients that keep no item",
}
MESSAGES = [{"role": "user", "content": "Where is my parcel?"}]
FUNCTION = {"name": "track", "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
TOOLS = [{"type": "function", **FUNCTION}]
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny"}}


adapter_of = cache(TypeAdapter)


def differences(kind: Any, value: Any) -> set[str]:
    """List the parts of a value that are not as its type says."""
    try:
        found = adapter_of(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        name = getattr(kind, "__name__", value.get("type"))
        return {f"{name}.{_place(fault['loc'])}: {fault['type']}" for fault in error.errors()}
    return set(_unknown(found))


def _place(parts: tuple[int | str, ...]) -> str:
    return ".".join(part for part in parts if isinstance(part, str))


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{type(value).__name__}.{name}: unknown" for name in value.model_extra or ())
        value = list(vars(value).values())
    for item in value if isinstance(value, list) else ():
        yield from _unknown(item)


class Asked:
    """Requests to a gateway."""

    def __init__(self, running: Running, client: httpx.Client) -> None:
        self._url, self._client = running.url, client

    def json(self, method: str, path: str, **more: Any) -> Any:
        return self._client.request(method, self._url + path, **more).json()

    def post(self, path: str, **fields: Any) -> Any:
        return self.json("POST", path, json={"model": "tiny", **fields})

    def events(self, path: str, **fields: Any) -> list[Any]:
        text = self._client.post(self._url + path, json={"model": "tiny", "stream": True, **fields}).text
        datas = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(data) for data in datas if data != "[DONE]"]


@pytest.fixture
def asked(start: Start, tmp_path: Path) -> Iterator[Asked]:
    reply = Reply(CALLING, log_probs=[-0.5] * len(CALLING), logits=[[0.0, 1.0]] * len(CALLING))
    batches = BatchStorage(BatchFolder(tmp_path / "batches"))
    running = start(reply, template=HERMES, returns_logits=True, batches=batches, aliases=("small",))
    with http_client(timeout=30) as client:
        yield Asked(running, client)


def everything(asked: Asked) -> Iterator[tuple[Any, Any]]:
    """Type and value of every kind of object and event."""
    log_probs = {"logprobs": True, "top_logprobs": 1}
    chats: list[Any] = [
        {},
        {"tools": CHAT_TOOLS},
        {"tools": CHAT_TOOLS, "max_tokens": 3},
        log_probs,
        {"n": 2},
    ]
    for fields in chats:
        yield ChatCompletion, asked.post("/v1/chat/completions", messages=MESSAGES, **fields)
        usage = {"stream_options": {"include_usage": True}}
        for chunk in asked.events("/v1/chat/completions", messages=MESSAGES, **fields, **usage):
            yield ChatCompletionChunk, chunk
    for fields in ({}, {"logprobs": 1}, {"echo": True, "max_tokens": 2}):
        yield Completion, asked.post("/v1/completions", prompt="Once", **fields)
        for chunk in asked.events("/v1/completions", prompt="Once", **fields):
            yield Completion, chunk
    responses: list[Any] = [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "max_output_tokens": 3},
        {"top_logprobs": 1},
    ]
    for fields in responses:
        made = asked.post("/v1/responses", input="Hi", **fields)
        yield Response, made
        for event in asked.events("/v1/responses", input="Hi", **fields):
            yield ResponseStreamEvent, event
    yield Response, asked.json("GET", f"/v1/responses/{made['id']}")
    for item in asked.json("GET", f"/v1/responses/{made['id']}/input_items")["data"]:
        yield ResponseItem, item
    yield InputTokenCountResponse, asked.post("/v1/responses/input_tokens", input="Hi")
    for model in asked.json("GET", "/v1/models")["data"]:
        yield Model, model
    yield from files_and_batches(asked)
    for path, fields in (
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/responses", {"input": 7}),
        ("/v1/none", {}),
    ):
        yield ErrorObject, asked.post(path, **fields)["error"]


def files_and_batches(asked: Asked) -> Iterator[tuple[Any, Any]]:
    upload = {"files": {"file": ("in.jsonl", json.dumps(LINE).encode())}, "data": {"purpose": "batch"}}
    file = asked.json("POST", "/v1/files", **upload)
    yield FileObject, file
    fields = {"input_file_id": file["id"], "endpoint": LINE["url"], "completion_window": "24h"}
    batch = asked.json("POST", "/v1/batches", json=fields)
    yield Batch, batch
    for item in asked.json("GET", "/v1/batches")["data"]:
        yield Batch, item
    other = asked.json("POST", "/v1/files", **upload)
    yield FileDeleted, asked.json("DELETE", f"/v1/files/{other['id']}")


def test_the_list_of_differences_is_complete(asked: Asked) -> None:
    found: set[str] = set()
    kinds: set[str] = set()
    for kind, value in everything(asked):
        assert isinstance(value, dict), value
        kinds.add(str(value.get("object") or value.get("type")))
        found |= differences(kind, value)
    assert sorted(found) == sorted(KNOWN)
    # Each kind was there, and none of them was an error in place of an answer.
    assert kinds >= {
        "chat.completion", "chat.completion.chunk", "text_completion", "response", "response.input_tokens", "model",
        "file", "batch", "invalid_request_error", "response.completed", "response.incomplete",
        "response.function_call_arguments.delta", "response.output_text.delta",
    }  # fmt: skip
