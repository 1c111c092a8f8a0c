"""POST /v1/embeddings: vectors of the sentence encoder with which the response cache compares questions."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.cache.backend import Vector
from pipeline.gateway.errors import ApiError
from pipeline.gateway.schema import EmbeddingRequest


class EmbeddingModel(Protocol):
    """A sentence encoder; `pipeline.cache.semantic.embedder.Embedder` is one."""

    identity: str  # name of the model, and of its file
    max_tokens: int

    def __call__(self, text: str, /) -> Vector | None:
        """Embed a text; None if it is empty or longer than `max_tokens`."""
        ...

    def tokens(self, text: str, /) -> int:
        """Count the tokens of a text."""
        ...


def embedding_model_name(embedder: EmbeddingModel) -> str:
    """Return the name under which requests may ask for an encoder, beside that of the deployment."""
    return embedder.identity.partition("/")[0]


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
