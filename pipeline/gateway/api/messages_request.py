"""Bodies of requests to Anthropic's Messages API, and the chats that they become.

Texts, thinking, documents that are text, tools and their results are taken.
Pictures, other documents and citations are refused by name. Written against anthropic-python 2.14 (`anthropic.types`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline.gateway.api.bounds import Label, Messages, Tools, Words
from pipeline.gateway.api.parsing import OpenModel, Shape, raise_faults, unsupported
from pipeline.gateway.api.schema import ChatRequest, any_strict
from pipeline.gateway.api.translated import OF_CHATS_ALONE, TranslatedRequest, chat_tools

_TAKEN = {"user": "text, document and tool_result", "assistant": "text, thinking and tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FORMS = '{"type": "text", "data": …} or {"type": "content", "content": …} with text'
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
    known={"id", "name", "input", "thinking", "tool_use_id", "content", *_INNER_BLOCK.known},
    idle={"cache_control", "caller", "data", "is_error", "signature"},
    within={"content": _INNER_BLOCK, **_INNER_BLOCK.within},
)


class OutputFormat(OpenModel):
    """Form of an answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenModel):
    """Form of an answer, and how hard the model is to think."""

    effort: Label | None = None
    format: OutputFormat | None = None


class CountTokensRequest(TranslatedRequest):
    """Body of POST /v1/messages/count_tokens."""

    refused: ClassVar = {
        **OF_CHATS_ALONE, "container": (None,), "context_management": (None,), "mcp_servers": (None, []),
    }  # fmt: skip
    # They edit what is sent back anyway, or need tools that the server would have to run.
    optional: ClassVar = frozenset({"container", "context_management", "mcp_servers"})
    idle: ClassVar = frozenset({
        "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
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
        ".function.parameters": ".input_schema", ".function.name": ".name", ".function.strict": ".strict",
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
        return forced or any_strict(self.tools) or self.output_config.format is not None

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
        """Return the request as one for a chat of `messages`. Raises what `to_chat` does."""
        form, choice = self.output_config.format, self.tool_choice or {}
        fields: dict[str, Any] = {}
        if form is not None:
            described = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": described}
        if self.output_config.effort is not None:
            fields["reasoning_effort"] = self.output_config.effort
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
            tools=chat_tools(self.tools, self.function_types, "input_schema"),
            tool_choice=_choice(choice) if choice else None,
            **fields,
        )


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)


def to_messages(
    system: str | Sequence[Mapping[str, Any]] | None, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages of a chat, as templates take them.

    Results of tools become messages of their own, before the text of the user's message that has them.

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
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for place, block in enumerate(content):
            at, kind = f"{where}.content.{place}", block.get("type") if isinstance(block, dict) else None
            if kind == "text":
                texts.append(_text([block], at, faults))
            elif kind == "document" and role == "user":
                texts.append(_document(block, at, faults))
            elif kind == "tool_use" and role == "assistant":
                calls.append(_call(block, at, names, faults))
            elif kind == "tool_result" and role == "user":
                results.append(_result(block, at, names, faults))
            elif kind == "thinking" and role == "assistant":
                thoughts.append(_text([{"text": block.get("thinking")}], at, faults))
            elif kind != "redacted_thinking":
                taken = _TAKEN.get(str(role), "text")
                faults.append(f"{at}.type: {str(kind)[:64]!r} is not supported here; there are {taken}")
        read += results
        if texts or calls or not results:
            further: dict[str, Any] = {"tool_calls": calls} if calls else {}
            if thoughts:
                further["reasoning_content"] = "\n".join(thoughts)
            read.append({"role": role, "content": "".join(texts), **further})
    raise_faults(faults, "messages")
    return read


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
            {"text": _document(block, f"{where}.content.{index}", faults)}
            if isinstance(block, dict) and block.get("type") == "document"
            else block
            for index, block in enumerate(content)
        ]
    text = _text("" if content is None else content, f"{where}.content", faults)
    return {"role": "tool", "tool_call_id": id, "name": names[id], "content": text}


def _document(block: Mapping[str, Any], where: str, faults: list[str]) -> str:
    """Title, context and content of a block of type document, each on lines of their own.

    >>> _document({"title": "Prices", "source": {"type": "text", "data": "Tea: 2"}}, "", [])
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
    """The text of a document's source; None if it is no text."""
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


def _choice(choice: Mapping[str, Any]) -> Any:
    """A choice of tools as chats have it."""
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise unsupported("tool_choice", "tool_choice.type: must be auto, any, tool or none")
    return _CHOICES[kind]
