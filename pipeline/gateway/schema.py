"""The requests, with the fields that OpenAI has. Unknown ones are refused as OpenAI refuses them.

What an engine cannot do is refused by name; what only means something to OpenAI's own service is taken and ignored.
Of our own are `top_k`, `min_tokens`, `repetition_penalty`, `bad_words`, `cache` (false: not looked up, not kept), and
`ttl_s` (how long the answer may be served again, at most as long as the recipe says).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.gateway.errors import ApiError

_IGNORED = (
    "metadata", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
)  # fmt: skip
# Field -> values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,), "function_call": (None, "none"), "functions": (None, []), "logit_bias": (None, {}),
    "modalities": (None, ["text"]), "prediction": (None,), "suffix": (None, ""), "web_search_options": (None,),
}  # fmt: skip


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
    """What else is streamed."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class JsonSchema(BaseModel):
    """A structure that an answer must have."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)
    name: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Plain text, any JSON object, JSON of a schema; or text of an expression or a grammar, which is not of OpenAI."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema", "regex", "ebnf"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None


class Generation(_Request):
    """What chat and plain completions share."""

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
    # not of OpenAI
    bad_words: list[str] | None = Field(default=None, max_length=1024)
    cache: bool = True
    min_tokens: int | None = Field(default=None, ge=0)
    repetition_penalty: float | None = Field(default=None, gt=0)
    top_k: int | None = Field(default=None, ge=0)
    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
            raise ApiError(400, text, param="stream_options")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens

    @property
    def has_schemas(self) -> bool:
        """Whether JSON schemas are to be checked, which takes longer than their size tells."""
        return self.response_format is not None and self.response_format.json_schema is not None

    @property
    def wants_log_probs(self) -> bool:
        """Whether tokens come with their log probabilities."""
        return False

    @property
    def likeliest(self) -> int:
        """Of how many tokens at each position the log probability is wanted besides."""
        return 0


class ChatRequest(Generation):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    logprobs: bool | None = False
    max_completion_tokens: int | None = Field(default=None, ge=1)
    parallel_tool_calls: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=1024)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _log_probs_of_the_chosen(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
        _like_logits(self, "top_logprobs")
        return self

    @property
    def has_schemas(self) -> bool:
        forced = bool(self.tools) and self.tool_choice not in (None, "auto", "none")
        return forced or super().has_schemas

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def likeliest(self) -> int:
        return self.top_logprobs or 0


class CompletionRequest(Generation):
    """POST /v1/completions"""

    best_of: int | None = Field(default=None, ge=1)
    echo: bool | None = False
    prompt: str | Annotated[list[Any], Field(min_length=1, max_length=64)]
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @model_validator(mode="after")
    def _what_engines_do(self) -> Self:
        if not all(isinstance(prompt, str) for prompt in self.prompts):
            raise ApiError(
                400, "prompt: must be a text or a list of texts; tokens are not taken", param="prompt"
            )
        if self.best_of not in (None, self.n or 1):
            raise _unsupported(
                "best_of", "best_of: choosing among more answers than n is not supported by this server"
            )
        _like_logits(self, "logprobs")
        if self.echo and self.logprobs is not None:
            raise _unsupported(
                "echo", "echo: the engine tells no log probabilities of a prompt; ask for one of both"
            )
        return self

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def likeliest(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str]:
        """One or more."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


def _like_logits(asked: Generation, name: str) -> None:
    """The likeliest tokens are told of the distribution after the temperature, and nothing else may have changed it."""
    if not asked.likeliest:
        return
    form = asked.response_format
    changed = {
        "response_format": form is not None and form.type != "text",
        "presence_penalty": bool(asked.presence_penalty),
        "frequency_penalty": bool(asked.frequency_penalty),
        "repetition_penalty": asked.repetition_penalty not in (None, 1),
        "min_tokens": bool(asked.min_tokens),
        "bad_words": bool(asked.bad_words),
    }
    if others := [other for other, changes in changed.items() if changes]:
        text = f"{name}: cannot be told together with {', '.join(others)}, which change what a token is drawn from"
        raise _unsupported(name, text)


def _unsupported(name: str, text: str) -> ApiError:
    return ApiError(400, text, param=name, code="unsupported_parameter")


class EmbeddingRequest(_Request):
    """POST /v1/embeddings"""

    input: str | Annotated[list[Any], Field(min_length=1, max_length=256)]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"

    @model_validator(mode="after")
    def _texts_as_they_are(self) -> Self:
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
        """One or more."""
        return [self.input] if isinstance(self.input, str) else self.input


_Kind = TypeVar("_Kind", bound=_Request)


# Each value is an object of Python, and none of them is made while other threads run: 50,000 take about 50 ms.
_MAX_VALUES = 50_000
_MAX_FAULTS = 16  # that are told


def parse(kind: type[_Kind], body: bytes) -> _Kind:
    """Read a request's body; ApiError 400 with what is wrong."""
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
    """About how many values JSON has: its strings, and the commas between them."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    strings = plain.count(b'"') // 2
    if strings > _MAX_VALUES:
        return strings
    return strings + sum(outside.count(b",") for outside in plain.split(b'"')[::2])
