"""Body of POST /v1/responses, and the chat that it comes to.

Messages, calls of functions and their results are taken as input items; reasoning items, which other servers give, are
left out, since no template has a place for them; a reference is replaced by the item that it names. All else is refused
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from pipeline.gateway.api.bounds import MAX_MESSAGES, Label, Metadata, Tools
from pipeline.gateway.api.parsing import OpenModel, Shape, hosted_tools, raise_faults, unsupported
from pipeline.gateway.api.prompts import read_arguments
from pipeline.gateway.api.responses.stored import Item
from pipeline.gateway.api.schema import ChatRequest
from pipeline.gateway.api.translated import OF_CHATS_ALONE, TranslatedRequest, chat_tools
from pipeline.gateway.errors import ApiError

LOG_PROBS = "message.output_text.logprobs"
# All but the log probabilities are of tools, images and reasoning that this server does not have.
Includable = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip
_ROLES = ("user", "assistant", "system", "developer")
_TAKEN = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_FUNCTION = '{"type": "function", "name": …}'
_CHOICES = f'none, auto, required, {_FUNCTION}, or {{"type": "allowed_tools", "mode": …, "tools": […]}}'


_PART = Shape(
    known={"type", "text", "refusal"},
    idle={"annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"},
)


class ReasoningConfig(OpenModel):
    """How models that reason are to; it comes back, and changes nothing."""

    idle: ClassVar = frozenset({"context", "generate_summary"})

    effort: Label | None = None
    summary: Label | None = None


class TextFormat(OpenModel):
    """Form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Label = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(OpenModel):
    """How the text of an answer is to be."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Label | None = None


class ResponseRequest(TranslatedRequest):
    """Body of POST /v1/responses."""

    refused: ClassVar = {
        **OF_CHATS_ALONE, "access_programs": (None,), "background": (None, False), "background_options": (None,),
        "context_management": (None, []), "conversation": (None,), "image": (None,), "moderation": (None,),
        "prompt": (None,),
    }  # fmt: skip
    # A conversation that is too long is refused, or loses its oldest turns (`truncation`).
    optional: ClassVar = frozenset({"context_management"})
    idle: ClassVar = frozenset({"prompt_cache_options", "prompt_cache_retention", "stream_options"})
    shapes: ClassVar = {
        "input": Shape(
            known={"type", "id", "role", "content", "status", "call_id", "name", "arguments", "output"},
            idle={"encrypted_content", "phase", "summary"},
            within={"content": _PART, "output": _PART},
        ),
        "tools": Shape(
            known={"type", "name", "description", "parameters", "strict"},
            idle={"allowed_callers", "defer_loading", "output_schema"},
        ),
        "tool_choice": Shape(known={"type", "name", "mode", "tools", "server_label"}),
    }
    names: ClassVar = {
        "'max_tokens' or 'max_completion_tokens'": "max_output_tokens",
        "response_format.json_schema": "text.format", "response_format": "text.format", "messages": "input",
        "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
        ".function.parameters": ".parameters", ".function.name": ".name", "logprobs": "include",
        "tool_choice.allowed_tools": "tool_choice",
        '{"type": "function", "function": {"name": …}}': _FUNCTION,
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}':
            '{"type": "allowed_tools", "mode": "auto" or "required", "tools": […]}',
    }  # fmt: skip

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
    include: Annotated[list[Includable], Field(max_length=64)] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = None
    metadata: Metadata | None = None
    previous_response_id: str | None = None
    prompt_cache_key: Label | None = None
    reasoning: ReasoningConfig | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    store: bool | None = None
    stream: bool | None = False
    text: TextConfig = TextConfig()
    tool_choice: str | dict[str, Any] | None = None
    tools: Tools | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = None
    user: Label | None = None
    _referred: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.input, list):
            references = (item.get("id") for item in self.input if item.get("type") == "item_reference")
            self._referred = tuple(id for id in references if isinstance(id, str))
        if self.text.format.type == "json_schema" and self.text.format.schema_ is None:
            raise ApiError(400, "text.format.schema: is missing", param="text")
        return self

    @property
    def referred_items(self) -> tuple[str, ...]:
        """Ids of the items that the input refers to."""
        return self._referred

    @property
    def has_schemas(self) -> bool:
        """Whether the request holds JSON schemas: checking them takes longer than their size suggests."""
        forced = bool(self.tools) and self.tool_choice not in (None, "auto", "none")
        return forced or self.text.format.schema_ is not None

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
        """Return the request as one for a chat of `messages`. Raises what `to_chat` does."""
        form = self.text.format
        described = {} if form.schema_ is None else {"json_schema": form.model_dump(by_alias=True)}
        log_probs = LOG_PROBS in (self.include or ()) or bool(self.top_logprobs)
        return self.to_chat(
            messages=messages,
            stream=self.stream,
            prompt_cache_key=self.prompt_cache_key,
            max_completion_tokens=self.max_output_tokens,
            response_format={"type": form.type, **described},
            logprobs=log_probs,
            top_logprobs=self.top_logprobs if log_probs else None,
            tools=chat_tools(self.tools, self.function_types, "parameters"),
            tool_choice=_choice(
                self.tool_choice, hosted_tools(self.tools or (), self.function_types).values()
            ),
        )

    def echo(self) -> dict[str, Any]:
        """Return the fields of the request that a response repeats."""
        form = self.text.format.model_dump(by_alias=True, exclude_none=True, exclude_defaults=False)
        if self.text.format.type != "json_schema":
            form = {"type": self.text.format.type}
        given = self.chat_fields
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": (self.reasoning or ReasoningConfig()).model_dump(),
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": 1.0 if given.get("temperature") is None else given["temperature"],
            "text": {"format": form, "verbosity": self.text.verbosity or "medium"},
            "tool_choice": self.tool_choice or "auto",
            "tools": [
                {"type": "function", "description": None, "strict": None, "parameters": None, **tool}
                for tool in self.tools or ()
                if tool.get("type") == "function"
            ],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if given.get("top_p") is None else given["top_p"],
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


def _choice(choice: str | Mapping[str, Any] | None, hosted: Collection[str]) -> Any:
    """A choice of tools as chats have it; one of a type in `hosted` stays as it is."""
    if not isinstance(choice, Mapping):
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            tools = choice.get("tools")
            named = [_choice(tool, hosted) for tool in tools] if isinstance(tools, list) else tools
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
        case str(kind) if kind in hosted:
            return choice
    raise unsupported("tool_choice", f"tool_choice: must be {_CHOICES}")


def item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of an item, which names its response.

    Args:
        kind: kind of the item, such as msg.
        index: number among all items of the response, those of its input first.
    """
    return f"{kind}_{response_id.partition('_')[2]}{index:04x}"


def response_of_item(id: str) -> str:
    """Return the id of the response that an item of this server belongs to.

    >>> response_of_item(item_id("msg", "resp_" + "a" * 32, 7)) == "resp_" + "a" * 32
    True
    """
    return f"resp_{id.partition('_')[2][:32]}"


def read_items(
    given: str | Sequence[Mapping[str, Any]], response_id: str, find: Callable[[str], Item | None]
) -> list[Item]:
    """Check the input of a response, and bring it into the form in which it is kept and listed.

    Args:
        find: returns the item that an id names; None if there is none.

    Raises:
        ApiError: 400, with the first faults.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    faults: list[str] = []
    read = []
    for index, item in enumerate(given):
        where, kind = f"input.{index}", item.get("type", "message")
        if kind == "item_reference":
            id = item.get("id")
            if (referred := find(id) if isinstance(id, str) else None) is None:
                faults.append(f"{where}.id: no item {id!r} of yours is remembered, or it stands twice")
                continue
            read.append(referred)
        elif isinstance(kind, str) and kind in _READERS:
            prefix, keep = _READERS[kind]
            read.append({"id": item_id(prefix, response_id, index), **keep(item, where, faults)})
        elif kind != "reasoning":
            faults.append(f"{where}.type: {str(kind)[:64]!r} is not supported; there are {', '.join(_TAKEN)}")
    raise_faults(faults, "input")
    return read


def to_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of a chat, as templates take them.

    A call of a function joins the message of the assistant before it, and a result has the name of what was called.

    Args:
        items: items of the conversation, as `read_items` returns them, and items of answers.

    Raises:
        ApiError: 400, if a result belongs to no call.

    >>> to_messages("Be brief.", read_items("Hi", "resp_1", lambda _: None))
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for item in items:
        if item["type"] == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            text = _text(item["content"])
            if role == "assistant" and messages and messages[-1].get("tool_calls"):
                # One answer: its text goes on after a call.
                messages[-1]["content"] += text
            else:
                messages.append({"role": role, "content": text})
        elif item["type"] == "function_call":
            names[item["call_id"]] = item["name"]
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": read_arguments(item["arguments"])}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            id = item["call_id"]
            if id not in names:
                text = f"No tool call found for function call output with call_id {id}."
                raise ApiError(400, text, param="input")
            messages.append(
                {"role": "tool", "tool_call_id": id, "name": names[id], "content": _text(item["output"])}
            )
    return messages


def _message(item: Item, where: str, faults: list[str]) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        faults.append(f"{where}.role: must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    content = _parts(item.get("content"), kind, f"{where}.content", faults)
    return {"type": "message", "role": role, "status": "completed", "content": content}


def _function_call(item: Item, where: str, faults: list[str]) -> Item:
    kept: dict[str, Any] = {"type": "function_call", "status": "completed"}
    for name in ("call_id", "name", "arguments"):
        given = item.get(name)
        if not isinstance(given, str) or not (given or name == "arguments"):
            faults.append(f"{where}.{name}: is missing")
        kept[name] = given
    return kept


def _function_call_output(item: Item, where: str, faults: list[str]) -> Item:
    if not isinstance(item.get("call_id"), str):
        faults.append(f"{where}.call_id: is missing")
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(output, "input_text", f"{where}.output", faults)
    return {
        "type": "function_call_output",
        "status": "completed",
        "call_id": item.get("call_id"),
        "output": output,
    }


# Type of an item -> prefix of its id, and what is kept of it.
_READERS: Mapping[str, tuple[str, Callable[[Item, str, list[str]], Item]]] = {
    "message": ("msg", _message), "function_call": ("fc", _function_call),
    "function_call_output": ("fco", _function_call_output),
}  # fmt: skip


def _parts(content: Any, kind: str, where: str, faults: list[str]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        faults.append(f"{where}: must be a text or a list of parts")
        return []
    kept: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        name = part.get("type") if isinstance(part, dict) else None
        key = _TEXTS.get(name) if isinstance(name, str) else None
        if key is None or not isinstance(part.get(key), str):
            faults.append(f'{where}.{index}: this model takes text only: {{"type": "{kind}", "text": …}}')
            continue
        kept.append({"type": name, key: part[key], **({"annotations": []} if name == "output_text" else {})})
    return kept


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part[_TEXTS[part["type"]]] for part in content)
