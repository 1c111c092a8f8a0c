"""Body of POST /v1/responses, and the chat that it comes to.

Of OpenAI's fields, those that only mean something to its own service are ignored, and what this server does not have is
refused by name. What chats take besides OpenAI's fields, such as `top_k` or `seed`, is taken here, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from pipeline.gateway.bounds import MAX_FAULTS, MAX_MESSAGES, Label, Metadata, Tools
from pipeline.gateway.errors import ApiError
from pipeline.gateway.schema import ChatRequest
from pipeline.gateway.translated_request import TranslatedRequest, unsupported

LOG_PROBS = "message.output_text.logprobs"
# All but the log probabilities are of tools, images and reasoning that this server does not have.
Includable = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip
_FUNCTION = '{"type": "function", "name": …}'
_CHOICES = f'none, auto, required, {_FUNCTION}, or {{"type": "allowed_tools", "mode": …, "tools": […]}}'


class ReasoningConfig(BaseModel):
    """How models that reason are to; it comes back, and changes nothing."""

    model_config = ConfigDict(extra="ignore")
    effort: Label | None = None
    summary: Label | None = None


class TextFormat(BaseModel):
    """Form of an answer."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    name: Label = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    """How the text of an answer is to be."""

    model_config = ConfigDict(extra="forbid")
    format: TextFormat = TextFormat(type="text")
    verbosity: Label | None = None


class ResponseRequest(TranslatedRequest):
    """Body of POST /v1/responses."""

    unsupported: ClassVar = {
        "access_programs": (None,), "background": (None, False), "background_options": (None,),
        "context_management": (None, []), "conversation": (None,), "image": (None,), "moderation": (None,),
        "prompt": (None,),
    }  # fmt: skip
    ignored: ClassVar = frozenset({"prompt_cache_options", "prompt_cache_retention", "stream_options"})
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
        faults = [
            f"tools.{index}.type: must be function; this server runs no other tools"
            for index, tool in enumerate(self.tools or ())
            if tool.get("type") != "function"
        ]
        if faults:
            raise unsupported("tools", "; ".join(faults[:MAX_FAULTS]))
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
        """Return the chat request that this one comes to.

        Args:
            messages: of the conversation.

        Raises:
            ApiError: 400, with what is wrong, in the words of chats; see `own_names`.
        """
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
            tools=[{"type": "function", "function": _function(tool)} for tool in self.tools or ()] or None,
            tool_choice=_choice(self.tool_choice),
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
            ],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if given.get("top_p") is None else given["top_p"],
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as chats have it."""
    fields = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in fields if tool.get(name) is not None}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    """A choice of tools as chats have it."""
    if not isinstance(choice, Mapping):
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            tools = choice.get("tools")
            named = [_choice(tool) for tool in tools] if isinstance(tools, list) else tools
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    raise unsupported("tool_choice", f"tool_choice: must be {_CHOICES}")
