"""Body of POST /v1/responses, and its translation into a chat request; `items` translates its input."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.gateway.api.bounds import MAX_MESSAGES, Label, Metadata, Tools
from pipeline.gateway.api.parsing import OpenModel, Shape, hosted_tools, unsupported
from pipeline.gateway.api.schema import ChatRequest, any_strict
from pipeline.gateway.api.translated import OF_CHATS_ALONE, TranslatedRequest, chat_tools
from pipeline.gateway.errors import ApiError

LOG_PROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
# The others are of tools and images that this server does not have.
Includable = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip
_FUNCTION = '{"type": "function", "name": …}'
_CHOICES = f'none, auto, required, {_FUNCTION}, or {{"type": "allowed_tools", "mode": …, "tools": […]}}'


_PART = Shape(
    known={"type", "text", "refusal"},
    idle={"annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"},
)


class ReasoningConfig(OpenModel):
    """How models that reason are to; a summary is never made."""

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
            known={
                "type",
                "id",
                "role",
                "content",
                "status",
                "call_id",
                "name",
                "arguments",
                "output",
                "encrypted_content",
                "summary",
            },
            idle={"phase"},
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
        ".function.parameters": ".parameters", ".function.name": ".name", ".function.strict": ".strict",
        "logprobs": "include",
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.text.format.type == "json_schema" and self.text.format.schema_ is None:
            raise ApiError(400, "text.format.schema: is missing", param="text")
        return self

    @cached_property
    def referred_items(self) -> tuple[str, ...]:
        """Ids of the items that the input refers to."""
        items = () if isinstance(self.input, str) else self.input
        references = (item.get("id") for item in items if item.get("type") == "item_reference")
        return tuple(id for id in references if isinstance(id, str))

    @property
    def has_schemas(self) -> bool:
        forced = bool(self.tools) and self.tool_choice not in (None, "auto", "none")
        return forced or any_strict(self.tools) or self.text.format.schema_ is not None

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
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
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
        chat_fields = self.chat_fields
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": chat_fields.get("parallel_tool_calls") is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": (self.reasoning or ReasoningConfig()).model_dump(),
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "temperature": 1.0 if chat_fields.get("temperature") is None else chat_fields["temperature"],
            "text": {"format": form, "verbosity": self.text.verbosity or "medium"},
            "tool_choice": self.tool_choice or "auto",
            "tools": [
                {"type": "function", "description": None, "strict": None, "parameters": None, **tool}
                for tool in self.tools or ()
                if tool.get("type") == "function"
            ],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if chat_fields.get("top_p") is None else chat_fields["top_p"],
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
