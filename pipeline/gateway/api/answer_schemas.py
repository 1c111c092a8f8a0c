"""JSON of answers as pydantic models, for the description of the API at /openapi.json.

Answers themselves are built as plain dictionaries, some of them for each token; `tests/clients/test_schemathesis.py`
holds them to these models. Files and batches have models of their own.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What is wrong; Anthropic's errors have no `param` and `code`."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str | None = None


class ErrorAnswer(BaseModel):
    """Every answer with a status of 400 or more."""

    error: ErrorDetail


class TokenUsage(BaseModel):
    """Tokens of all prompts, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None


class CalledFunction(BaseModel):
    """What a call of a tool says; the arguments are JSON, as text."""

    name: str
    arguments: str


class ToolCallAnswer(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(BaseModel):
    """One choice of a chat."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatAnswer(BaseModel):
    """Answer to POST /v1/chat/completions; streamed, if the request asks for it, as `chat.completion.chunk`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage


class CompletionChoice(BaseModel):
    """One choice of a plain completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class CompletionAnswer(BaseModel):
    """Answer to POST /v1/completions; streamed, if the request asks for it, as events of the same kind."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage


class EmbeddingItem(BaseModel):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(BaseModel):
    """Answer to POST /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class ModelObject(BaseModel):
    """A model, or an alias of one; `root` is the model's own name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """Answer to GET /v1/models."""

    object: Literal["list"]
    data: list[ModelObject]


class FalseHitAnswer(BaseModel):
    """Answer to POST /v1/cache/false_hits: how many entries were removed."""

    object: Literal["cache.false_hit"]
    request_id: str
    model: str
    removed: int
