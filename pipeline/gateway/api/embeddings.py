"""POST /v1/embeddings: vectors of the sentence encoder with which the response cache compares questions."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.cache.backend import Vector
from pipeline.gateway.api.parsing import ignored_headers, parse_request, tolerate, unsupported
from pipeline.gateway.api.schema import OpenAIRequest
from pipeline.gateway.context import EndpointFamily
from pipeline.gateway.errors import ApiError
from pipeline.gateway.records import RequestRecord
from pipeline.gateway.served_model import EmbeddingModel, embedding_model_name
from pipeline.gateway.web import ApiRoute


class EmbeddingRequest(OpenAIRequest):
    """Body of POST /v1/embeddings."""

    input: str | Annotated[list[Any], Field(min_length=1, max_length=256)]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"

    @model_validator(mode="after")
    def _check_inputs(self) -> Self:
        if self.dimensions is not None:
            text = "dimensions: this model's embeddings have one size and are not shortened"
            raise unsupported("dimensions", text)
        if not all(isinstance(text, str) for text in self.texts):
            text = "input: must be a text or a list of texts; tokens are not taken"
            raise ApiError(400, text, param="input")
        if not all(self.texts):
            raise ApiError(400, "input: must not be empty", param="input")
        return self

    @property
    def texts(self) -> list[str]:
        """The inputs, one or more."""
        return [self.input] if isinstance(self.input, str) else self.input


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


class EmbeddingEndpoints(EndpointFamily):
    """Embeddings."""

    @ApiRoute("POST", "/v1/embeddings", "Embed texts.", request=EmbeddingRequest, response=EmbeddingAnswer)
    async def _embed(self, request: Request) -> Response:
        context = self.context
        tenant = await context.authenticate(request)
        body = await context.receive_body(request)
        record: RequestRecord = request.scope["record"]

        def count() -> tuple[EmbeddingRequest, EmbeddingModel, list[int]]:
            parsed = parse_request(EmbeddingRequest, body)
            embedder, strict = self._find_embedder(parsed.model)
            record.headers += ignored_headers(tolerate(parsed, None, strict=strict))
            return parsed, embedder, [embedder.tokens(text) for text in parsed.texts]

        parsed, embedder, counts = await context.parsers.run(count, request, len(body), tenant)
        record.fields |= {"model": context.own_name(parsed.model), "prompt_tokens": sum(counts)}
        async with tenant.enforce_limits(sum(counts)):
            answer = await create_embeddings(parsed, embedder, counts)
        context.metrics.count_tokens(tenant.name, "prompt", sum(counts))
        return JSONResponse(answer)

    def _find_embedder(self, name: str) -> tuple[EmbeddingModel, bool]:
        """Find an encoder by the name of a deployment that has one, or by its own; and whether its recipe is strict."""
        for model in self.context.models.values():
            embedder = model.embedder
            if embedder is not None and name in (*model.names, embedding_model_name(embedder)):
                return embedder, model.strict
        self.context.find_model(name)
        text = f"The model `{name}` has no embeddings: its recipe has no semantic cache (cache.semantic)"
        raise ApiError(404, text, param="model", code="model_not_found")


async def create_embeddings(
    request: EmbeddingRequest, embedder: EmbeddingModel, counts: Sequence[int]
) -> dict[str, Any]:
    """Embed all inputs of a request, in a thread, so that streams go on meanwhile; returns the body of the answer.

    Args:
        counts: tokens of each input.

    Raises:
        ApiError: 400, with every input that is longer than the encoder reads: none is cut.
    """
    most = embedder.max_tokens
    faults = [
        f"{_place(request, index)}: has {count} tokens; this model reads at most {most}"
        for index, count in enumerate(counts)
        if count > most
    ]
    if faults:
        raise ApiError(400, "; ".join(faults), param="input", code="context_length_exceeded")
    vectors = [await asyncio.to_thread(embedder, text) for text in request.texts]
    data = [
        {"object": "embedding", "index": index, "embedding": _encode(vector, request.encoding_format)}
        for index, vector in enumerate(vectors)
        if vector is not None
    ]
    assert len(data) == len(vectors), "inputs that have no embedding are refused before"
    usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    return {"object": "list", "data": data, "model": embedding_model_name(embedder), "usage": usage}


def _encode(vector: Vector, encoding_format: str) -> list[float] | str:
    """Numbers, or the base64 of little-endian float32."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _place(request: EmbeddingRequest, index: int) -> str:
    return "input" if isinstance(request.input, str) else f"input.{index}"
