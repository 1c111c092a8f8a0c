"""Anthropic's Messages API as a layer over chats: requests, and answers whole or as the events of a stream.

    message_start, ping
      content_block_start, content_block_delta …, content_block_stop     of each text or use of a tool
    message_delta, message_stop, or error

Written against anthropic-python 2.14 (`anthropic.types`). Texts, documents that are text, tools and their results are
taken; thinking, which other servers give, is left out of what comes back. Pictures, other documents and citations are
refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.client import Cached, Chunk, PromptTooLong
from pipeline.gateway.api.generation import Generation
from pipeline.gateway.api.model_answer import Asker, GeneratingEndpoints
from pipeline.gateway.api.parsing import OpenModel, Shape
from pipeline.gateway.api.prompts import read_arguments
from pipeline.gateway.api.schema import ChatRequest
from pipeline.gateway.api.sse import encode_event, encode_text
from pipeline.gateway.api.translated import (
    OF_CHATS_ALONE,
    AnswerItem,
    AnswerItems,
    ItemStep,
    StopSequenceCutter,
    TranslatedRequest,
    unsupported,
)
from pipeline.gateway.bounds import MAX_FAULTS, Messages, Tools, Words
from pipeline.gateway.endpoints.endpoint import ApiEndpoint
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.traces import Span

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_LEFT_OUT = ("thinking", "redacted_thinking")


_TEXT_BLOCK = Shape(known={"type", "text"}, idle={"cache_control", "citations"})
_DOCUMENT = {"title", "context", "source", "citations"}
# Within the result of a tool, or the content of a document.
_INNER_BLOCK = Shape(
    known={"type", "text", *_DOCUMENT},
    idle={"cache_control"},
    within={
        "source": Shape(
            known={"type", "data", "content"}, idle={"media_type"}, within={"content": _TEXT_BLOCK}
        )
    },
)
_BLOCK = Shape(
    known={"id", "name", "input", "tool_use_id", "content", *_INNER_BLOCK.known},
    idle={"cache_control", "caller", "data", "is_error", "signature", "thinking"},
    within={"content": _INNER_BLOCK, **_INNER_BLOCK.within},
)


class OutputFormat(OpenModel):
    """Form of an answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenModel):
    """How an answer is to be. The effort changes nothing here."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(TranslatedRequest):
    """Body of POST /v1/messages/count_tokens."""

    refused: ClassVar = {
        **OF_CHATS_ALONE, "container": (None,), "context_management": (None,), "mcp_servers": (None, []),
    }  # fmt: skip
    # They edit what is sent back anyway, or need tools that the server would have to run.
    optional: ClassVar = frozenset({"container", "context_management", "mcp_servers"})
    idle: ClassVar = frozenset({
        "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed", "thinking",
        "user_profile_id", "workspace_id",
    })  # fmt: skip
    shapes: ClassVar = {
        "system": _BLOCK,
        "messages": Shape(known={"role", "content"}, within={"content": _BLOCK}),
        "tools": Shape(
            known={"type", "name", "description", "input_schema", "strict"},
            idle={
                "allowed_callers",
                "cache_control",
                "defer_loading",
                "eager_input_streaming",
                "input_examples",
            },
        ),
        "tool_choice": Shape(known={"type", "name", "disable_parallel_tool_use"}),
    }
    function_types: ClassVar = (None, "custom")
    names: ClassVar = {
        "'max_tokens' or 'max_completion_tokens'": "max_tokens", "max_completion_tokens": "max_tokens",
        "response_format.json_schema": "output_config.format", "response_format": "output_config.format",
        ".function.parameters": ".input_schema", ".function.name": ".name",
        '{"type": "function", "function": {"name": …}}': '{"name": …, "input_schema": {…}}',
    }  # fmt: skip

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1)
    output_config: OutputConfig = OutputConfig()
    stop_sequences: Words | None = None
    stream: bool | None = False
    system: str | list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    tools: Tools | None = None

    @property
    def has_schemas(self) -> bool:
        forced = bool(self.tools) and (self.tool_choice or {}).get("type") in ("any", "tool")
        return forced or self.output_config.format is not None

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
        """Return the chat request that this one comes to.

        Args:
            messages: of the conversation.

        Raises:
            ApiError: 400, with what is wrong, in the words of chats; see `own_names`.
        """
        form, choice = self.output_config.format, self.tool_choice or {}
        fields: dict[str, Any] = {}
        if form is not None:
            described = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": described}
        if choice.get("disable_parallel_tool_use"):
            fields["parallel_tool_calls"] = False
        if self.stop_sequences:
            fields |= {"stop": self.stop_sequences, "include_stop_str_in_output": True}
        # Who ends with the beginning of an answer wants the rest of it.
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = True
        return self.to_chat(
            messages=messages,
            stream=self.stream,
            max_completion_tokens=self.max_tokens,
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=_choice(choice) if choice else None,
            **fields,
        )


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)


class AnthropicMessage:
    """One message. It may be made in any thread; its methods are for the event loop."""

    keep_alive: ClassVar = encode_event({"type": "ping"}, "ping")

    def __init__(
        self, request: CountTokensRequest, model: ServedModel, tenant: Tenant, request_id: str, span: Span
    ) -> None:
        """Check the request, render its prompt, and count its tokens.

        Args:
            request: of the client.
            model: that it names.
            tenant: whose request it is.
            request_id: unique among all requests.
            span: of the request.

        Raises:
            ApiError: 400, with what is wrong.
            PromptTooLong: the conversation has more tokens than the engine takes.
            ClientError: the template does not take the messages.
        """
        self.cached: Cached | None = None
        self._request, self._id = request, f"msg_{request_id}"
        with request.own_names():
            tenant.check_choices(1)
            messages = to_messages(request.system, request.messages)
            self.generation = Generation(model, tenant, request.chat(messages), [messages], request_id, span)
        self._items = AnswerItems(self.generation)
        keeps = bool(request.chat_fields.get("include_stop_str_in_output"))
        self._stop = StopSequenceCutter(request.stop_sequences or (), keeps=keeps)

    @property
    def streams(self) -> bool:
        """Whether the answer is to be streamed."""
        return bool(self._request.stream)

    async def whole(self) -> Mapping[str, Any]:
        """Generate the whole answer, and return it as one object."""
        with self._request.own_names():
            async with aclosing(self.generation.chunks()) as pairs:
                async for _, chunk in pairs:
                    for _ in self._steps(chunk):
                        pass
        content = [_block(item) for item in self._items.items]
        return {**self._message(content), **self._end(), "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Generate the answer as server-sent events, those of a chunk as soon as it has come."""
        usage = {"input_tokens": self.generation.prompt_tokens, "output_tokens": 0}
        start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        events = [_event("message_start", message=start), self.keep_alive]
        with self._request.own_names():
            async with aclosing(self.generation.chunks()) as pairs:
                async for _, chunk in pairs:
                    events += (_step_event(step) for step in self._steps(chunk))
                    if events:
                        yield b"".join(events)
                        events.clear()
        yield _event("message_delta", delta=self._end(), usage=self._usage()) + _event("message_stop")

    def error_events(self, error: ApiError, request_id: str) -> bytes:
        """Encode what ends a stream that fails after it began.

        Args:
            error: by which it fails.
            request_id: of the request.
        """
        return encode_event(error.anthropic_body(request_id), "error")

    def _steps(self, chunk: Chunk) -> Iterator[ItemStep]:
        self.cached = self.cached or chunk.cached
        return self._items.feed(self._stop.cut(chunk))

    def _message(self, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self.generation.model.name,
            "content": content,
        }  # fmt: skip

    def _end(self) -> dict[str, Any]:
        reason = _STOP_REASONS[self._items.finish_reason or "stop"]
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


def to_messages(
    system: str | Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages of a chat, as templates take them.

    Results of tools become messages of their own, before the text of the user's message that has them.

    Args:
        system: of the request.
        messages: of the request.

    Raises:
        ApiError: 400, with the first faults.

    >>> to_messages("Be brief.", [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    faults: list[str] = []
    read: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    if system:
        read.append({"role": "system", "content": _text(system, "system", faults)})
    for index, message in enumerate(messages):
        where, role = f"messages.{index}", message.get("role")
        if role not in ("user", "assistant", "system"):
            faults.append(f"{where}.role: must be user, assistant or system")
        content = message.get("content")
        if not isinstance(content, list):
            content = [{"type": "text", "text": content}]
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for place, block in enumerate(content):
            at, kind = f"{where}.content.{place}", block.get("type") if isinstance(block, dict) else None
            if kind == "text":
                texts.append(_text([block], at, faults))
            elif kind == "document" and role == "user":
                texts.append(document_text(block, at, faults))
            elif kind == "tool_use" and role == "assistant":
                calls.append(_call(block, at, names, faults))
            elif kind == "tool_result" and role == "user":
                results.append(_result(block, at, names, faults))
            elif kind not in _LEFT_OUT:
                faults.append(
                    f"{at}.type: {str(kind)[:64]!r} is not supported here; there are {_taken(role)}"
                )
        read += results
        if texts or calls or not results:
            read.append({"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})})
    if faults:
        raise ApiError(400, "; ".join(faults[:MAX_FAULTS]), param="messages")
    return read


def _taken(role: Any) -> str:
    return {"user": "text, document and tool_result", "assistant": "text and tool_use"}.get(str(role), "text")


def _text(content: Any, where: str, faults: list[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        faults.append(f"{where}: must be a text or a list of blocks")
        return ""
    texts = [block.get("text") if isinstance(block, dict) else None for block in content]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            faults.append(f'{where}.{index}: this model takes text only: {{"type": "text", "text": …}}')
    return "".join(text for text in texts if isinstance(text, str))


def _call(block: Mapping[str, Any], where: str, names: dict[str, str], faults: list[str]) -> dict[str, Any]:
    id, name, arguments = block.get("id"), block.get("name"), block.get("input")
    if not (isinstance(id, str) and isinstance(name, str) and isinstance(arguments, dict)):
        faults.append(f'{where}: must be {{"type": "tool_use", "id": …, "name": …, "input": {{…}}}}')
        return {}
    names[id] = name
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(
    block: Mapping[str, Any], where: str, names: Mapping[str, str], faults: list[str]
) -> dict[str, Any]:
    id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(id, str) or id not in names:
        faults.append(f"{where}.tool_use_id: there is no tool_use of this id before")
        return {}
    if isinstance(content, list):
        content = [
            {"text": document_text(block, f"{where}.content.{index}", faults)}
            if isinstance(block, dict) and block.get("type") == "document"
            else block
            for index, block in enumerate(content)
        ]
    text = _text("" if content is None else content, f"{where}.content", faults)
    return {"role": "tool", "tool_call_id": id, "name": names[id], "content": text}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chats have it."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        # `resolve_tools` leaves it out, and refuses it where it must be called.
        return {"type": kind, "name": tool.get("name")}
    fields = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    function = {there: tool[here] for here, there in fields.items() if tool.get(here) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> Any:
    """A choice of tools as chats have it."""
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise unsupported("tool_choice", "tool_choice.type: must be auto, any, tool or none")
    return _CHOICES[kind]


def _block(item: AnswerItem) -> dict[str, Any]:
    if item.call is None:
        return {"type": "text", "text": item.text, "citations": None}
    # If they were cut off, `stop_reason` says so.
    arguments = read_arguments(item.text)
    return {"type": "tool_use", "id": item.call.id, "name": item.call.name, "input": arguments}


def _step_event(step: ItemStep) -> bytes:
    item = step.item
    if step.kind == "begin":
        return _event("content_block_start", index=item.index, content_block=_block(item))
    if step.kind == "end":
        return _event("content_block_stop", index=item.index)
    kind, key = ("text_delta", "text") if item.call is None else ("input_json_delta", "partial_json")
    delta = f'{{"type":"{kind}","{key}":{encode_text(step.text)}}}'
    data = f'{{"type":"content_block_delta","index":{item.index},"delta":{delta}}}'
    return f"event: content_block_delta\ndata: {data}\n\n".encode()


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


_FORMS = '{"type": "text", "data": …} or {"type": "content", "content": …} with text'


def document_text(block: Mapping[str, Any], where: str, faults: list[str]) -> str:
    """Return the text of a block of type document: its title, its context and its content, each on lines of their own.

    Args:
        block: of a message, or of the result of a tool.
        where: its place in the request.
        faults: gets what is wrong with it.

    >>> document_text({"title": "Prices", "source": {"type": "text", "data": "Tea: 2"}}, "", [])
    'Prices\\nTea: 2\\n\\n'
    """
    citations = block.get("citations")
    if isinstance(citations, Mapping) and citations.get("enabled"):
        faults.append(f"{where}.citations: are not supported by this server")
    lines = []
    for name in ("title", "context"):
        text = block.get(name)
        if isinstance(text, str):
            lines.append(text)
        elif text is not None:
            faults.append(f"{where}.{name}: must be a text")
    content = _content(block.get("source"))
    if content is None:
        faults.append(f"{where}.source: this model takes text only: {_FORMS}")
    return "\n".join([*lines, content or ""]) + "\n\n"


def _content(source: Any) -> str | None:
    """The text of a source; None if it is none."""
    if not isinstance(source, Mapping):
        return None
    if source.get("type") == "text":
        return source["data"] if isinstance(source.get("data"), str) else None
    content = source.get("content") if source.get("type") == "content" else None
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [
        block["text"]
        for block in content
        if isinstance(block, Mapping) and isinstance(block.get("text"), str)
    ]
    return "\n".join(texts) if len(texts) == len(content) else None


class MessageEndpoints(GeneratingEndpoints):
    """Messages."""

    def too_long(self, error: PromptTooLong) -> ApiError:
        # By these words clients know that they have to shorten the conversation.
        text = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
        return ApiError(400, text, code="context_length_exceeded")

    def endpoints(self) -> Sequence[ApiEndpoint]:
        return (
            ApiEndpoint(
                "POST", "/v1/messages", self._create, "Answer a conversation, as Anthropic's API does.",
                request=MessagesRequest, direct=True,
            ),
            ApiEndpoint(
                "POST", "/v1/messages/count_tokens", self._count, "Count the tokens that a message would read.",
                request=CountTokensRequest,
            ),
        )  # fmt: skip

    async def _create(self, request: Request) -> Response:
        return await self.generate(request, MessagesRequest, _message, prompt_field="messages")

    async def _count(self, request: Request) -> Response:
        checked = await self.check(request, CountTokensRequest, _message, prompt_field="messages")
        return JSONResponse({"input_tokens": checked.generation.prompt_tokens})


def _message(body: CountTokensRequest, asker: Asker) -> AnthropicMessage:
    return AnthropicMessage(body, asker.model, asker.tenant, asker.record.id, asker.record.span)
