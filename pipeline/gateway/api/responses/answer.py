"""The answer to POST /v1/responses: what it continues, and OpenAI's response object, whole or as events of a stream.

response.created, response.in_progress
  response.output_item.added               of each text (a message), reasoning or call of a function
    response.content_part.added            of a text or reasoning
      response.output_text.delta …         or response.reasoning_text.delta …, response.function_call_arguments.delta …
      response.output_text.done            or response.reasoning_text.done, response.function_call_arguments.done
    response.content_part.done
  response.output_item.done
response.completed, or response.incomplete if the answer was cut off, or error and response.failed
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, islice, takewhile
from typing import Any

from pipeline.client import PromptTooLong
from pipeline.gateway.api.bounds import MAX_MESSAGES, MAX_REFERRED
from pipeline.gateway.api.generation import Generation
from pipeline.gateway.api.model_answer import AnswerContext
from pipeline.gateway.api.responses.items import item_id, read_items, response_of_item, seal, to_messages
from pipeline.gateway.api.responses.request import SEALED_REASONING, ResponseRequest
from pipeline.gateway.api.responses.stored import Item, StoredConversation, StoredResponse, StoredResponses
from pipeline.gateway.api.sse import encode_event, encode_json, encode_text
from pipeline.gateway.api.translated import AnswerItem, ItemAnswer, ItemStep
from pipeline.gateway.database import known_form
from pipeline.gateway.errors import ApiError

_READ_AT_ONCE = 16


@dataclass(slots=True)
class RecalledResponses:
    """Stored responses that were read for one request.

    Attributes:
        before: conversation that the request continues.
        referred: responses whose items the request refers to, by id.
    """

    before: StoredConversation = field(default_factory=StoredConversation)
    referred: Mapping[str, StoredResponse] = field(default_factory=dict)
    _items: dict[str, dict[str, Item]] = field(default_factory=dict)  # by response and id

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return self.before.size + sum(response.size for response in self.referred.values())

    def take_item(self, id: str) -> Item | None:
        """Return an item of a response; None if there is none of this id, or it was taken already."""
        response = response_of_item(id)
        if response not in self._items:
            stored = self.referred.get(response)
            self._items[response] = {} if stored is None else {item["id"]: item for item in stored.items()}
        return self._items[response].pop(id, None)


def recall(
    request: ResponseRequest, tenant: str, stored: StoredResponses, most_bytes: int
) -> RecalledResponses:
    """Read what a request continues and refers to, at most `most_bytes` of JSON of each. It blocks.

    Raises:
        ApiError: 400, if something is not stored, or too large; 501, if nothing is stored here; 503, if what stores
            responses cannot be used.
    """
    before = _conversation(request, tenant, stored, most_bytes)
    return RecalledResponses(before, _referred(request, tenant, stored, most_bytes))


def _conversation(
    request: ResponseRequest, tenant: str, stored: StoredResponses, most_bytes: int
) -> StoredConversation:
    id = request.previous_response_id
    if id is None:
        return StoredConversation()
    before = stored.conversation(tenant, known_form(id), most_items=MAX_MESSAGES, most_bytes=most_bytes)
    if before is None:
        text = f"Previous response with id '{id[:64]}' not found."
        raise ApiError(400, text, param="previous_response_id", code="previous_response_not_found")
    if before.complete:
        return before
    if request.truncation != "auto":
        text = f"The conversation has more than {MAX_MESSAGES} items or {most_bytes} bytes"
        raise ApiError(400, text, param="previous_response_id", code="context_length_exceeded")
    # The results of calls stand after the calls.
    return before._replace(items=list(dropwhile(lambda item: item.get("role") != "user", before.items)))


def _referred(
    request: ResponseRequest, tenant: str, stored: StoredResponses, most_bytes: int
) -> Mapping[str, StoredResponse]:
    ids = dict.fromkeys(known_form(response_of_item(item)) for item in request.referred_items)
    if len(ids) > MAX_REFERRED:
        raise ApiError(400, f"input: refers to items of more than {MAX_REFERRED} responses", param="input")
    responses: dict[str, StoredResponse] = {}
    remaining = iter(ids)
    while page := tuple(islice(remaining, _READ_AT_ONCE)):
        responses |= stored.find(tenant, page)
        if sum(response.size for response in responses.values()) > most_bytes:
            raise ApiError(400, "input: refers to too many large responses", param="input")
    return responses


# Stores a response under its id, and returns whether it did.
Store = Callable[[str, StoredResponse], Awaitable[bool]]


class ModelResponse(ItemAnswer):
    """One response."""

    def __init__(
        self,
        request: ResponseRequest,
        context: AnswerContext,
        recalled: RecalledResponses,
        store: Store | None,
    ) -> None:
        """
        Args:
            recalled: stored responses that it continues and refers to.
            store: stores the response when it is complete, unless the request says no; None: nothing is stored here.
        """
        # Nobody can guess it: where no keys are needed, whoever knows it may ask for the response.
        self.id = f"resp_{secrets.token_hex(16)}"
        with request.own_names():
            items = read_items(request.input, self.id, recalled.take_item)
            messages = to_messages(request.instructions, [*recalled.before.items, *items])
            chat = request.chat(messages)

            def generation(messages: Sequence[dict[str, Any]]) -> Generation:
                return context.generation(chat, [messages])

            try:
                generated = generation(messages)
            except PromptTooLong:
                if request.truncation != "auto":
                    raise
                generated = _last_that_fits(messages, generation)
        super().__init__(request, generated)
        self._store = None if request.store is False else store
        self._previous = request.previous_response_id
        self._seals = SEALED_REASONING in (request.include or ())
        self._input, self._first_output = encode_json(items).encode(), len(items)
        self._output: list[dict[str, Any]] = []
        self._sequence = 0
        self._piece_head = ""  # beginning that the events of all pieces of the item share
        constant = {
            "id": self.id, "object": "response", "created_at": int(time.time()), "model": generated.model_name,
            **request.echo(),
        }  # fmt: skip
        # Encoded once: what a response repeats of its request may be large.
        self._head = encode_json(constant)[:-1]

    async def body(self) -> bytes:
        _, response = await self._complete()
        return response.encode()

    def first_events(self) -> list[bytes]:
        response = self._object("in_progress")
        return [self._response_event(kind, response) for kind in ("created", "in_progress")]

    async def last_events(self) -> bytes:
        return self._response_event(*await self._complete())

    def error_events(self, error: ApiError, request_id: str) -> bytes:
        failure = {"code": "server_error", "message": error.message}
        response = self._object("failed", error=failure, output=self._output)
        # OpenAI's types have the fields of an error at the top, its service has them in `error`: clients read either.
        fields = {"code": error.code, "message": error.message, "param": error.param}
        failed = self._event("error", **fields, **error.body(request_id))
        return failed + self._response_event("failed", response)

    def item_ended(self, item: AnswerItem) -> None:
        self._output.append(self._item(item, "incomplete" if self.finish_reason == "length" else "completed"))

    def step_events(self, step: ItemStep) -> bytes:
        """Encode a piece with as little work as possible: there is a piece for each token."""
        if step.kind != "piece":
            return b"".join(self._item_events(step))
        number, self._sequence = self._sequence, self._sequence + 1
        data = f'"sequence_number":{number},"delta":{encode_text(step.text)}'
        if step.item.call is None and not step.item.reasoning:
            data += f',"logprobs":{encode_json(step.log_probs) if step.log_probs else "[]"}'
        return f"{self._piece_head},{data}}}\n\n".encode()

    def _item_events(self, step: ItemStep) -> Iterator[bytes]:
        """Encode the beginning or the end of an item."""
        item, is_text = step.item, step.item.call is None
        of_item = {"item_id": self._item_id(item), "output_index": item.index}
        of_text = {**of_item, "content_index": 0}
        if step.kind == "begin":
            added = self._item(item, "in_progress")
            if is_text:
                added["content"] = []
            yield self._event("response.output_item.added", output_index=item.index, item=added)
            if is_text:
                yield self._event("response.content_part.added", **of_text, part=_part(item))
            kind = _kind(item)
            head = {"type": f"response.{kind}.delta", **(of_text if is_text else of_item)}
            self._piece_head = f"event: {head['type']}\ndata: {encode_json(head)[:-1]}"
        else:
            if is_text:
                done = {"text": item.text, **({} if item.reasoning else {"logprobs": item.log_probs})}
                yield self._event(f"response.{_kind(item)}.done", **of_text, **done)
                yield self._event("response.content_part.done", **of_text, part=_part(item))
            elif item.call is not None:
                done = {"name": item.call.name, "arguments": item.text}
                yield self._event("response.function_call_arguments.done", **of_item, **done)
            yield self._event("response.output_item.done", output_index=item.index, item=self._output[-1])

    def _item(self, item: AnswerItem, status: str) -> dict[str, Any]:
        if item.call is not None:
            return {
                "id": self._item_id(item), "type": "function_call", "status": status, "call_id": item.call.id,
                "name": item.call.name, "arguments": item.text,
            }  # fmt: skip
        if item.reasoning:
            own = {"id": self._item_id(item), "type": "reasoning", "status": status, "summary": []}
            return {
                **own,
                "content": [_part(item)],
                "encrypted_content": seal(item.text) if self._seals else None,
            }
        return {
            "id": self._item_id(item), "type": "message", "status": status, "role": "assistant",
            "content": [_part(item)],
        }  # fmt: skip

    def _item_id(self, item: AnswerItem) -> str:
        kind = "fc" if item.call is not None else "rs" if item.reasoning else "msg"
        return item_id(kind, self.id, self._first_output + item.index)

    async def _complete(self) -> tuple[str, str]:
        """Return the status and the JSON of the response when the generation is over, and keep it."""
        usage = await self.generation.usage_aside()
        fields: dict[str, Any] = {
            "output": self._output,
            "completed_at": int(time.time()),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
                "total_tokens": usage["total_tokens"],
            },
        }
        status = "completed"
        if self.finish_reason == "length":
            status, fields["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
        response = self._object(status, **fields)
        if self._store is not None:
            stored = StoredResponse(response.encode(), self._input, self._previous)
            if not await self._store(self.id, stored):
                # The answer is there all the same, and says that it is not stored.
                self._store = None
                response = self._object(status, **fields)
        return status, response

    def _object(self, status: str, **fields: Any) -> str:
        """The JSON of the response."""
        empty = dict.fromkeys(("error", "incomplete_details", "usage", "completed_at"))
        stored = self._store is not None
        fields_json = encode_json({"status": status, "store": stored, **empty, "output": [], **fields})
        return f"{self._head},{fields_json[1:]}"

    def _response_event(self, status: str, response: str) -> bytes:
        kind, number = f"response.{status}", self._sequence
        self._sequence += 1
        data = f'{{"type":"{kind}","sequence_number":{number},"response":{response}}}'
        return f"event: {kind}\ndata: {data}\n\n".encode()

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return encode_event({"type": kind, "sequence_number": number, **fields}, kind)


def _last_that_fits(
    messages: Sequence[dict[str, Any]], make: Callable[[Sequence[dict[str, Any]]], Generation]
) -> Generation:
    """Drop as few of the oldest turns as it takes, and nothing of the system messages before them.

    Raises:
        PromptTooLong: the last turn alone is too long.
    """
    head = list(takewhile(lambda message: message["role"] == "system", messages))
    turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
    low, high = 1, max(1, len(turns) - 1)
    while low < high:
        middle = (low + high) // 2
        try:
            make([*head, *messages[turns[middle] :]])
            high = middle
        except PromptTooLong:
            low = middle + 1
    return make([*head, *messages[turns[low] :]] if low < len(turns) else messages)


def _kind(item: AnswerItem) -> str:
    """Name of the events of an item's pieces."""
    if item.call is not None:
        return "function_call_arguments"
    return "reasoning_text" if item.reasoning else "output_text"


def _part(item: AnswerItem) -> dict[str, Any]:
    if item.reasoning:
        return {"type": "reasoning_text", "text": item.text}
    log_probs = [
        {**_with_bytes(token), "top_logprobs": [_with_bytes(other) for other in token["top_logprobs"]]}
        for token in item.log_probs
    ]
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": log_probs}


def _with_bytes(token: Mapping[str, Any]) -> dict[str, Any]:
    """Chats have null where the bytes of a part of a character are not known; here is no null."""
    return {**token, "bytes": token["bytes"] or []}
