"""Bodies of requests, as pydantic models of OpenAI's fields, and of those that vLLM and trtllm-serve have besides.

What becomes of unknown fields, of those that only mean something to OpenAI's own service, and of what no engine can do
is in `pipeline.gateway.api.parsing`; the fields are listed here. Of our own are `cache` (false: not looked up, not
stored), and `ttl_s` (how long the answer may be served from the cache, at most as long as the recipe says). Nothing
here knows the model: what its engine lacks is found in `served_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.client.sampling import is_neutral
from pipeline.gateway.api.bounds import (
    MAX_PROMPTS,
    Documents,
    Label,
    LogitBias,
    Messages,
    StopTokenIds,
    Tools,
    WordOrWords,
    Words,
)
from pipeline.gateway.api.parsing import OpenModel, Shape, unsupported
from pipeline.gateway.api.response_format import FormFields
from pipeline.gateway.errors import ApiError

_TEXT_PART = Shape(
    known={"type", "text", "refusal"}, idle={"annotations", "cache_control", "citations", "logprobs"}
)
_TOOL_CALL = Shape(
    known={"id", "type", "function"},
    idle={"index"},
    within={"function": Shape(known={"name", "arguments"}, for_template=True)},
    for_template=True,
)
_MESSAGE = Shape(
    known={
        "role",
        "content",
        "name",
        "reasoning",
        "reasoning_content",
        "refusal",
        "tool_calls",
        "tool_call_id",
    },
    idle={"annotations", "audio", "cache_control", "function_call"},
    within={"content": _TEXT_PART, "tool_calls": _TOOL_CALL},
    for_template=True,
)
_FUNCTION = Shape(known={"name", "description", "parameters", "strict"}, for_template=True)
_TOOL = Shape(known={"type", "function"}, idle={"cache_control"}, within={"function": _FUNCTION})
_TOOL_CHOICE = Shape(
    known={"type", "function", "allowed_tools"},
    within={"function": Shape(known={"name"}), "allowed_tools": Shape(known={"mode", "tools"})},
)
# Parameters that change what a token is drawn from, in ways that the logits do not tell.
_RESHAPING = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "bad_words")
_TEMPLATE_ARGUMENTS = {"messages", "self", "tools"}
# Shows what `prompts.read_messages` takes.
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
        },
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
}


def any_strict(tools: Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether calls of a tool are to be held to its schema; a chat's tools have the field in an object of theirs."""
    functions = (tool.get("function", tool) for tool in tools or ())
    return any(isinstance(function, Mapping) and function.get("strict") is True for function in functions)


class ModelRequest(OpenModel):
    """Body of a request that names a model."""

    model_config = ConfigDict(strict=False)

    model: Label

    @property
    def has_schemas(self) -> bool:
        """Whether the request holds JSON schemas: checking them takes longer than their size suggests."""
        return False


class OpenAIRequest(ModelRequest):
    """Body of a request of OpenAI's older endpoints."""

    idle: ClassVar = frozenset({
        "guided_decoding_backend", "metadata", "prompt_cache_key", "prompt_cache_retention",
        "request_id", "safety_identifier", "service_tier", "session_id",
        "spaces_between_special_tokens", "store", "user", "verbosity",
    })  # fmt: skip
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (None,), "allowed_token_ids": (None, []), "audio": (None,), "cache_salt": (None,),
        "chat_template": (None,), "detokenize": (None, True), "disaggregated_params": (None,),
        "early_stopping": (None, False), "function_call": (None, "none"), "functions": (None, []),
        "guided_whitespace_pattern": (None,), "kv_transfer_params": (None,), "length_penalty": (None, 1),
        "logits_processors": (None, []), "lora_request": (None,), "mm_processor_kwargs": (None,),
        "modalities": (None, ["text"]), "prediction": (None,), "priority": (None, 0), "prompt_embeds": (None,),
        "prompt_ignore_length": (None, 0), "return_context_logits": (None, False), "return_token_ids": (None, False),
        "return_tokens_as_token_ids": (None, False), "suffix": (None, ""), "thinking_token_budget": (None, -1),
        "top_p_min": (None, 0), "truncate_prompt_tokens": (None,), "use_beam_search": (None, False),
        "vllm_xargs": (None, {}), "web_search_options": (None,),
    }  # fmt: skip
    # They ask for speed, or for a search that the server would have to run.
    optional: ClassVar = frozenset({"prediction", "priority", "web_search_options"})


class StreamOptions(OpenModel):
    """Parts of a stream besides the answer."""

    idle: ClassVar = frozenset({"continuous_usage_stats", "include_obfuscation"})

    include_usage: bool = False


class GenerationRequest(OpenAIRequest, FormFields):
    """Fields that chat and plain completions share."""

    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=16)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    # Requests with the same key go to the same server, where there are several.
    prompt_cache_key: Label | None = None
    seed: int | None = None
    stop: WordOrWords | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    # Fields that OpenAI does not have, or has for plain completions alone.
    bad_words: Words | None = None
    best_of: int | None = Field(default=None, ge=1, le=20)
    cache: bool = True
    ignore_eos: bool | None = False
    include_reasoning: bool | None = True
    include_stop_str_in_output: bool | None = False
    min_p: float | None = Field(default=None, ge=0, le=1)
    min_tokens: int | None = Field(default=None, ge=0)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    repetition_penalty: float | None = Field(default=None, gt=0)
    skip_special_tokens: bool | None = True
    stop_token_ids: StopTokenIds | None = None
    top_k: int | None = Field(default=None, ge=-1)
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
            raise ApiError(400, text, param="stream_options")
        if self.best_of is not None and self.best_of < self.choices:
            raise ApiError(400, f"best_of: must be at least n = {self.choices}", param="best_of")
        if self.stream and self.candidates > self.choices:
            text = "best_of: answers that are chosen among cannot be streamed"
            raise ApiError(400, text, param="best_of")
        if self.stream and self.prompt_logprobs is not None:
            text = "prompt_logprobs: are not available in a stream; /v1/completions streams them with echo and logprobs"
            raise ApiError(400, text, param="prompt_logprobs")
        return self

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Number of answers to each prompt that are generated; the best of them are the choices."""
        return self.best_of or self.choices

    @property
    def output_token_limit(self) -> int | None:
        """Most tokens of each answer; None is as many as the model can."""
        return self.max_tokens

    @property
    def has_schemas(self) -> bool:
        response_format, structured = self.response_format, self.structured_outputs
        return (
            self.guided_json is not None
            or (
                response_format is not None
                and (response_format.json_schema is not None or response_format.schema_ is not None)
            )
            or (structured is not None and structured.json_ is not None)
        )

    @property
    def wants_log_probs(self) -> bool:
        """Whether the log probability of each token is asked for."""
        return False

    @property
    def num_top_logprobs(self) -> int:
        """How many alternatives are asked for at each position, with their log probabilities."""
        return 0

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives are asked for at each position of the prompt; None: no log probabilities at all."""
        return self.prompt_logprobs


class TemplateFields(BaseModel):
    """Fields for the chat template, which vLLM's server takes besides OpenAI's."""

    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    documents: Documents | None = None

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        opens = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and opens:
            text = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            raise ApiError(400, text, param="continue_final_message")
        if reserved := sorted((self.chat_template_kwargs or {}).keys() & _TEMPLATE_ARGUMENTS):
            text = f"chat_template_kwargs.{reserved[0]}: is set by the request itself"
            raise ApiError(400, text, param="chat_template_kwargs")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template besides messages and tools, without defaults."""
        variables = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            variables["documents"] = self.documents
        if self.continue_final_message:
            variables["continue_final_message"] = True
        elif self.add_generation_prompt is False:
            variables["add_generation_prompt"] = False
        return variables


class ThinkingConfig(OpenModel):
    """Whether the model is to think before it answers, as the APIs of Anthropic, DeepSeek and Z.ai have it."""

    idle: ClassVar = frozenset({"budget_tokens", "clear_thinking", "display"})

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class ChatRequest(GenerationRequest, TemplateFields):
    """Body of POST /v1/chat/completions."""

    shapes: ClassVar = {"messages": _MESSAGE, "tools": _TOOL, "tool_choice": _TOOL_CHOICE}

    messages: Messages = Field(json_schema_extra={"items": MESSAGE_SCHEMA})
    logprobs: bool | None = False
    max_completion_tokens: int | None = Field(default=None, ge=1)
    parallel_tool_calls: bool | None = None
    reasoning_effort: Label | None = None
    tool_choice: Label | dict[str, Any] | None = None
    tools: Tools | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    # Fields that OpenAI does not have.
    add_special_tokens: Literal[False] | None = False
    echo: bool | None = False
    thinking: ThinkingConfig | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        _check_top_logprobs(self, "top_logprobs")
        return self

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think; None: as its template has it."""
        kind = None if self.thinking is None else self.thinking.type
        return {"enabled": True, "disabled": False}.get(kind or "")

    @property
    def has_schemas(self) -> bool:
        forced = bool(self.tools) and self.tool_choice not in (None, "auto", "none")
        return forced or any_strict(self.tools) or super().has_schemas

    @property
    def output_token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def num_top_logprobs(self) -> int:
        return self.top_logprobs or 0


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    echo: bool | None = False
    prompt: str | Annotated[list[Any], Field(min_length=1)]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    max_tokens: int | None = Field(default=None, ge=0)
    suffix: str | None = None
    # A field that OpenAI does not have: whether a prompt begins with the tokens that the tokenizer puts in front.
    add_special_tokens: bool | None = True

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if len(self.prompts) > MAX_PROMPTS:
            raise ApiError(400, f"prompt: must be at most {MAX_PROMPTS} prompts", param="prompt")
        token_ids = (prompt for prompt in self.prompts if not isinstance(prompt, str))
        if not all(isinstance(ids, list) and ids and all(type(id) is int for id in ids) for ids in token_ids):
            text = "prompt: must be a text, a list of token ids (whole numbers), or a list of either"
            raise ApiError(400, text, param="prompt")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens must be at least 1, got 0.", param="max_tokens")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ApiError(400, "suffix: needs a prompt that is a text", param="suffix")
        if self.suffix and self.echo:
            raise ApiError(400, "suffix: cannot be combined with echo", param="suffix")
        _check_top_logprobs(self, "logprobs")
        return self

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0

    @property
    def num_prompt_logprobs(self) -> int | None:
        numbers = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in numbers if number is not None), default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or more, each a text or its token ids."""
        if isinstance(self.prompt, str) or type(self.prompt[0]) is int:
            return [self.prompt]
        return self.prompt


def _check_top_logprobs(request: GenerationRequest, field: str) -> None:
    """Refuse alternatives together with penalties and the like, which change the distribution tokens are drawn from.

    Their log probabilities come from the temperature and the logits, in which only the form of the answer shows.
    """
    if not request.num_top_logprobs:
        return
    values = {name: getattr(request, name) for name in _RESHAPING}
    if others := [name for name, value in values.items() if value and not is_neutral(name, value)]:
        text = f"{field}: cannot be told together with {', '.join(others)}, which change what a token is drawn from"
        raise unsupported(field, text)
