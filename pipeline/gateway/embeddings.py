"""POST /v1/embeddings: vectors of the sentence encoder that the response cache compares questions with."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Protocol

from pipeline.cache.backend import Vector
from pipeline.gateway.errors import ApiError
from pipeline.gateway.schema import EmbeddingRequest


class Embeds(Protocol):
    """What is needed of an embedder; `pipeline.cache.semantic.embedder.Embedder` is one."""

    identity: str  # name of the model, and of its file
    max_tokens: int

    def __call__(self, text: str, /) -> Vector | None: ...

    def tokens(self, text: str, /) -> int: ...


def embedding_model(embedder: Embeds) -> str:
    """The name under which requests may ask for it, beside that of the deployment."""
    return embedder.identity.partition("/")[0]


async def embeddings(request: EmbeddingRequest, embedder: Embeds, counts: Sequence[int]) -> dict[str, Any]:
    """The answer as OpenAI has it. Encoding runs in a thread: streams go on meanwhile.

    Args:
        counts: tokens of each input.

    Raises:
        ApiError: 400, with every input that is longer than the encoder reads: none is cut.
    """
    most = embedder.max_tokens
    faults = [
        f"{_where(request, index)}: has {count} tokens; this model reads at most {most}"
        for index, count in enumerate(counts)
        if count > most
    ]
    if faults:
        raise ApiError(400, "; ".join(faults), param="input", code="context_length_exceeded")
    vectors = [await asyncio.to_thread(embedder, text) for text in request.texts]
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector, request.encoding_format)}
        for index, vector in enumerate(vectors)
        if vector is not None
    ]
    if len(data) != len(vectors):
        raise AssertionError("inputs that have no embedding are refused before")
    usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    return {"object": "list", "data": data, "model": embedding_model(embedder), "usage": usage}


def _packed(vector: Vector, form: str) -> list[float] | str:
    """Numbers, or the base64 of little-endian float32."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _where(request: EmbeddingRequest, index: int) -> str:
    return "input" if isinstance(request.input, str) else f"input.{index}"
