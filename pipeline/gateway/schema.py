"""Bodies of requests, as pydantic models of OpenAI's fields, and the messages of a chat as templates take them.

Unknown fields are refused as OpenAI refuses them, and so is what no engine can do; fields that only mean something to
OpenAI's own service are ignored. Fields that OpenAI does not have: `top_k`, `min_tokens`, `repetition_penalty`,
`bad_words`, `cache` (false: not looked up, not stored), and `ttl_s` (how long the answer may be served from the cache,
at most as long as the recipe says). Nothing here knows the model: what its engine lacks is found in `served_model`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.gateway.errors import ApiError

_IGNORED = (
    "metadata", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
)  # fmt: skip
# Field -> values that ask for nothing; all others are refused.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,), "function_call": (None, "none"), "functions": (None, []), "logit_bias": (None, {}),
    "modalities": (None, ["text"]), "prediction": (None,), "suffix": (None, ""), "web_search_options": (None,),
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Each value becomes a Python object, which takes the interpreter's lock: 50,000 take about 50 ms.
_MAX_VALUES = 50_000
_MAX_FAULTS = 16  # in one message


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)

    model: str

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, nothing in _UNSUPPORTED.items():
            if name in given and given[name] not in nothing:
                raise _unsupported(name, f"{name} is not supported by this server")
        ignored = {*_IGNORED, *_UNSUPPORTED}
        kept = {name: value for name, value in given.items() if name not in ignored}
        unknown = [name for name in kept if name not in cls.model_fields]
        if unknown:
            listed = ", ".join(name[:64] for name in unknown[:_MAX_FAULTS])
            raise ApiError(400, f"Unrecognized request argument supplied: {listed}", param=unknown[0])
        return kept


class StreamOptions(BaseModel):
    """What is streamed besides the answer."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class JsonSchema(BaseModel):
    """A JSON schema that an answer must match."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Form of an answer. OpenAI has text, json_object and json_schema; trtllm-serve 1.2 also regex and ebnf."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema", "regex", "ebnf"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerationRequest(_Request):
    """Fields that chat and plain completions share."""

    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=16)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    response_format: ResponseFormat | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    # Fields that OpenAI does not have.
    bad_words: list[str] | None = Field(default=None, max_length=1024)
    cache: bool = True
    min_tokens: int | None = Field(default=None, ge=0)
    repetition_penalty: float | None = Field(default=None, gt=0)
    top_k: int | None = Field(default=None, ge=0)
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
            raise ApiError(400, text, param="stream_options")
        return self

    @property
    def output_token_limit(self) -> int | None:
        """Most tokens of each answer; None is as many as the model can."""
        return self.max_tokens

    @property
    def has_schemas(self) -> bool:
        """Whether the request holds JSON schemas: checking them takes longer than their size suggests."""
        return self.response_format is not None and self.response_format.json_schema is not None

    @property
    def wants_log_probs(self) -> bool:
        """Whether the log probability of each token is asked for."""
        return False

    @property
    def num_top_logprobs(self) -> int:
        """How many alternatives are asked for at each position, with their log probabilities."""
        return 0


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    logprobs: bool | None = False
    max_completion_tokens: int | None = Field(default=None, ge=1)
    parallel_tool_calls: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=1024)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        _check_top_logprobs(self, "top_logprobs")
        return self

    @property
    def has_schemas(self) -> bool:
        forced = bool(self.tools) and self.tool_choice not in (None, "auto", "none")
        return forced or super().has_schemas

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

    best_of: int | None = Field(default=None, ge=1)
    echo: bool | None = False
    prompt: str | Annotated[list[Any], Field(min_length=1, max_length=64)]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ApiError(
                400, "prompt: must be a text or a list of texts; tokens are not taken", param="prompt"
            )
        if self.best_of not in (None, self.n or 1):
            raise _unsupported(
                "best_of", "best_of: choosing among more answers than n is not supported by this server"
            )
        _check_top_logprobs(self, "logprobs")
        if self.echo and self.logprobs is not None:
            raise _unsupported(
                "echo", "echo: the engine tells no log probabilities of a prompt; ask for one of both"
            )
        return self

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_top_logprobs(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str]:
        """The prompts, one or more."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


def _check_top_logprobs(request: GenerationRequest, field: str) -> None:
    """Refuse alternatives together with whatever changes the distribution that tokens are drawn from.

    Their log probabilities come from the logits and the temperature alone.
    """
    if not request.num_top_logprobs:
        return
    form = request.response_format
    changed = {
        "response_format": form is not None and form.type != "text",
        "presence_penalty": bool(request.presence_penalty),
        "frequency_penalty": bool(request.frequency_penalty),
        "repetition_penalty": request.repetition_penalty not in (None, 1),
        "min_tokens": bool(request.min_tokens),
        "bad_words": bool(request.bad_words),
    }
    if others := [other for other, changes in changed.items() if changes]:
        text = f"{field}: cannot be told together with {', '.join(others)}, which change what a token is drawn from"
        raise _unsupported(field, text)


def _unsupported(name: str, text: str) -> ApiError:
    return ApiError(400, text, param=name, code="unsupported_parameter")


class FalseHitRequest(BaseModel):
    """Body of POST /v1/cache/false_hits."""

    model_config = ConfigDict(extra="forbid")
    request_id: str = Field(min_length=1, max_length=64)


class EmbeddingRequest(_Request):
    """Body of POST /v1/embeddings."""

    input: str | Annotated[list[Any], Field(min_length=1, max_length=256)]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if self.dimensions is not None:
            raise _unsupported(
                "dimensions", "dimensions: this model's embeddings have one size and are not shortened"
            )
        if not all(isinstance(text, str) for text in self.texts):
            raise ApiError(
                400, "input: must be a text or a list of texts; tokens are not taken", param="input"
            )
        if not all(self.texts):
            raise ApiError(400, "input: must not be empty", param="input")
        return self

    @property
    def texts(self) -> list[str]:
        """The inputs, one or more."""
        return [self.input] if isinstance(self.input, str) else self.input


_Kind = TypeVar("_Kind", bound=BaseModel)


def parse_request(kind: type[_Kind], body: bytes) -> _Kind:
    """Parse and validate the body of a request.

    Args:
        kind: model of the request.
        body: JSON.

    Raises:
        ApiError: 400, with the first faults of the body.
    """
    if len(body) > _MAX_VALUES and _values(body) > _MAX_VALUES:
        raise ApiError(400, f"body: has more than {_MAX_VALUES} values: texts, numbers, lists and objects")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)[:_MAX_FAULTS]
        texts = [f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults]
        if error.error_count() > _MAX_FAULTS:
            texts.append(f"and {error.error_count() - _MAX_FAULTS} more")
        first = faults[0]["loc"]
        raise ApiError(400, "; ".join(texts), param=str(first[0]) if first else None) from None


def _values(body: bytes) -> int:
    """Estimate how many values a JSON text has: its strings, and the commas between them."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    strings = plain.count(b'"') // 2
    if strings > _MAX_VALUES:
        return strings
    return strings + sum(outside.count(b",") for outside in plain.split(b'"')[::2])


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn messages as OpenAI's clients send them into what chat templates take.

    Templates want one text a message, and the arguments of a call as an object. Everything else stays as it is.

    Raises:
        ApiError: 400, with every fault.

    >>> read_messages([{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}])
    [{'role': 'system', 'content': 'Be brief.'}]
    """
    faults: list[str] = []
    read = [_read_message(message, f"messages.{index}", faults) for index, message in enumerate(messages)]
    if faults:
        raise ApiError(400, "; ".join(faults), param="messages")
    return read


def _read_message(message: Mapping[str, Any], where: str, faults: list[str]) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        faults.append(f"{where}.role: must be one of {', '.join(_ROLES)}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        faults.append(f"{where}.tool_call_id: is missing")
    calls = message.get("tool_calls") if role == "assistant" else None
    read = {key: value for key, value in message.items() if value is not None}
    read["role"] = "system" if role == "developer" else role
    if message.get("content") is None:
        if not calls:
            faults.append(f"{where}.content: is missing")
        read["content"] = ""
    else:
        read["content"] = _read_content(message["content"], f"{where}.content", faults)
    if calls:
        read["tool_calls"] = [
            _read_call(call, f"{where}.tool_calls.{index}", faults) for index, call in enumerate(calls)
        ]
    return read


def _read_content(content: Any, where: str, faults: list[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        faults.append(f"{where}: must be a text or a list of parts")
        return ""
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            faults.append(f'{where}.{index}: this model takes text only: {{"type": "text", "text": …}}')
    return "".join(texts)


def _read_call(call: Any, where: str, faults: list[str]) -> Any:
    """A call with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        faults.append(f"{where}.function.name: is missing")
        return call
    arguments = function.get("arguments", "{}")
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        read = None
    if not isinstance(read, dict):
        faults.append(f"{where}.function.arguments: must be a JSON object, as text")
    return {**call, "function": {**function, "arguments": read}}
