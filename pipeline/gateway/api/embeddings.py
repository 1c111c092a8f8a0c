"""POST /v1/embeddings: vectors of the sentence encoder with which the response cache compares questions."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.cache.backend import Vector
from pipeline.gateway.api.answer_schemas import EmbeddingAnswer
from pipeline.gateway.api.parsing import ignored_headers, parse_request, tolerate
from pipeline.gateway.api.schema import EmbeddingRequest
from pipeline.gateway.endpoints.endpoint import ApiEndpoint, EndpointFamily
from pipeline.gateway.errors import ApiError
from pipeline.gateway.records import RequestRecord
from pipeline.gateway.served_model import EmbeddingModel, embedding_model_name


class EmbeddingEndpoints(EndpointFamily):
    """Embeddings."""

    def endpoints(self) -> Sequence[ApiEndpoint]:
        return (
            ApiEndpoint(
                "POST", "/v1/embeddings", self._embed, "Embed texts.",
                request=EmbeddingRequest, response=EmbeddingAnswer,
            ),
        )  # fmt: skip

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
    """Embed all inputs of a request, in a thread, so that streams go on meanwhile.

    Args:
        request: with the inputs.
        embedder: of the model that it names.
        counts: tokens of each input.

    Returns:
        The body of OpenAI's response.

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
    if len(data) != len(vectors):
        raise AssertionError("inputs that have no embedding are refused before")
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
