"""Anthropic's Messages API as a layer over chats: endpoints, and answers whole or as the events of a stream.

    message_start, ping
      content_block_start, content_block_delta …, content_block_stop     of each thinking, text or use of a tool
    message_delta, message_stop, or error

Written against anthropic-python 2.14 (`anthropic.types`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.client import Chunk, PromptTooLong
from pipeline.gateway.api.messages_request import CountTokensRequest, MessagesRequest, to_messages
from pipeline.gateway.api.model_answer import AnswerContext, GeneratingEndpoints
from pipeline.gateway.api.prompts import read_arguments
from pipeline.gateway.api.sse import encode_event, encode_text
from pipeline.gateway.api.tools.dialects import Marks
from pipeline.gateway.api.translated import AnswerItem, ItemAnswer, ItemStep
from pipeline.gateway.errors import ApiError
from pipeline.gateway.web import ApiRoute

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageEndpoints(GeneratingEndpoints):
    """Messages, and how many tokens a message would read."""

    def too_long(self, error: PromptTooLong) -> ApiError:
        # By these words clients know that they have to shorten the conversation.
        text = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
        return ApiError(400, text, code="context_length_exceeded")

    @ApiRoute(
        "POST", "/v1/messages", "Answer a conversation, as Anthropic's API does.",
        request=MessagesRequest, direct=True,
    )  # fmt: skip
    async def _create(self, request: Request) -> Response:
        return await self.generate(request, MessagesRequest, AnthropicMessage, prompt_field="messages")

    @ApiRoute(
        "POST", "/v1/messages/count_tokens", "Count the tokens that a message would read.",
        request=CountTokensRequest,
    )  # fmt: skip
    async def _count(self, request: Request) -> Response:
        message = await self.check(request, CountTokensRequest, AnthropicMessage, prompt_field="messages")
        return JSONResponse({"input_tokens": message.generation.prompt_tokens})


class AnthropicMessage(ItemAnswer):
    """One message."""

    keep_alive: ClassVar = encode_event({"type": "ping"}, "ping")

    def __init__(self, request: CountTokensRequest, context: AnswerContext) -> None:
        with request.own_names():
            messages = to_messages(request.system, request.messages)
            super().__init__(request, context.generation(request.chat(messages), [messages]))
        self._id = f"msg_{context.record.id}"
        keeps = bool(request.chat_fields.get("include_stop_str_in_output"))
        self._stop = StopSequenceCutter(request.stop_sequences or (), keeps=keeps)

    async def body(self) -> Mapping[str, Any]:
        content = [_block(item) for item in self.items]
        return {**self._message(content), **self._end_fields(), "usage": self._usage()}

    def first_events(self) -> list[bytes]:
        usage = {"input_tokens": self.generation.prompt_tokens, "output_tokens": 0}
        start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=start), self.keep_alive]

    async def last_events(self) -> bytes:
        delta = _event("message_delta", delta=self._end_fields(), usage=self._usage())
        return delta + _event("message_stop")

    def error_events(self, error: ApiError, request_id: str) -> bytes:
        return encode_event(error.anthropic_body(request_id), "error")

    def steps(self, chunk: Chunk) -> Iterator[ItemStep]:
        return super().steps(self._stop.cut(chunk))

    def step_events(self, step: ItemStep) -> bytes:
        item = step.item
        if step.kind == "begin":
            return _event("content_block_start", index=item.index, content_block=_block(item))
        if step.kind == "end":
            signed = b""
            if item.reasoning:
                signature = {"type": "signature_delta", "signature": _signature(item)}
                signed = _event("content_block_delta", index=item.index, delta=signature)
            return signed + _event("content_block_stop", index=item.index)
        kind, key = ("text_delta", "text") if item.call is None else ("input_json_delta", "partial_json")
        if item.reasoning:
            kind, key = "thinking_delta", "thinking"
        delta = f'{{"type":"{kind}","{key}":{encode_text(step.text)}}}'
        data = f'{{"type":"content_block_delta","index":{item.index},"delta":{delta}}}'
        return f"event: content_block_delta\ndata: {data}\n\n".encode()

    def _message(self, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self.generation.model_name,
            "content": content,
        }  # fmt: skip

    def _end_fields(self) -> dict[str, Any]:
        reason = _STOP_REASONS[self.finish_reason or "stop"]
        if self._stop.found is not None and reason == "end_turn":
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": self._stop.found}

    def _usage(self) -> dict[str, Any]:
        """Anthropic counts apart what came from a cache."""
        usage = self.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        }  # fmt: skip


def _signature(item: AnswerItem) -> str:
    """A digest in place of Anthropic's signature: thinking is taken back whatever its signature is."""
    return hashlib.sha256(item.text.encode()).hexdigest() if item.pieces else ""


def _block(item: AnswerItem) -> dict[str, Any]:
    if item.reasoning:
        return {"type": "thinking", "thinking": item.text, "signature": _signature(item)}
    if item.call is None:
        return {"type": "text", "text": item.text, "citations": None}
    # If they were cut off, `stop_reason` says so.
    arguments = read_arguments(item.text)
    return {"type": "tool_use", "id": item.call.id, "name": item.call.name, "input": arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


class StopSequenceCutter:
    """Cuts the stop sequence off an answer that was generated with `include_stop_str_in_output`, chunk by chunk.

    Attributes:
        found: the sequence that ended the answer; None if none did.
    """

    def __init__(self, sequences: Sequence[str], *, keeps: bool) -> None:
        """`keeps`: whether the sequence stays in the text."""
        self.found: str | None = None
        self._sequences, self._keeps = [sequence for sequence in sequences if sequence], keeps
        self._beginnings = Marks(self._sequences)
        self._waiting = ""  # text that may be a stop sequence

    def cut(self, chunk: Chunk) -> Chunk:
        """Return the next chunk with the text that is certain to be no stop sequence."""
        if not self._sequences:
            return chunk
        text, self._waiting = self._waiting + chunk.text, ""
        if chunk.finish_reason is None:
            whole = (len(sequence) for sequence in self._sequences if text.endswith(sequence))
            certain = len(text) - max(self._beginnings.partial(text), *whole, 0)
            text, self._waiting = text[:certain], text[certain:]
        elif chunk.finish_reason != "length":
            # Of several sequences, the one that begins first ended the answer.
            self.found = max(filter(text.endswith, self._sequences), key=len, default=None)
            if self.found is not None and not self._keeps:
                text = text.removesuffix(self.found)
        return replace(chunk, text=text)
