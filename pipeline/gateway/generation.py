"""One request to the model, as several choices at once if so asked, under the limits of tenant and deployment."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pipeline.cache.aio import AsyncCachedStream, AsyncCachingClient
from pipeline.client import AsyncStream, Chunk, Sampling, Stats
from pipeline.gateway.errors import ApiError
from pipeline.gateway.schema import ChatRequest, _Generation
from pipeline.gateway.served import Served
from pipeline.gateway.tenants import Tenant

_SEED_BITS = 63
_SEED_STEP = 0x9E3779B97F4A7C15  # so that choices of one seed differ


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be generated."""

    served: Served
    tenant: Tenant
    request: _Generation
    prompt: str | Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    prompt_tokens: int
    request_id: str

    @property
    def max_tokens(self) -> int:
        """Of each choice."""
        return min(
            self.request.limit or self.served.bounds.max_output_tokens, self.served.bounds.max_output_tokens
        )

    @property
    def choices(self) -> int:
        """How many."""
        return self.request.n or 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[list[AsyncStream | AsyncCachedStream]]:
        """The streams of all choices, once there is a place for them."""
        tokens = self.choices * (self.prompt_tokens + self.max_tokens)
        async with AsyncExitStack() as stack:
            stack.enter_context(self.tenant.request(tokens))
            for _ in range(self.choices):
                await stack.enter_async_context(
                    self.served.admission.place(self.prompt_tokens + self.max_tokens)
                )
            yield [await stack.enter_async_context(self._stream(index)) for index in range(self.choices)]

    def _stream(self, index: int) -> AsyncStream | AsyncCachedStream:
        client = self.served.client(self.tenant.name)
        sampling, drawn = self._sampling(index)
        request_id = self.request_id if self.choices == 1 else f"{self.request_id}-{index}"
        if isinstance(client, AsyncCachingClient):
            return client.stream(
                self.prompt,
                request_id=request_id,
                tools=self.tools,
                cache=self.request.cache,
                unkeyed=drawn,
                **sampling,
            )
        sampling.update(drawn)
        return client.stream(self.prompt, request_id=request_id, tools=self.tools, **sampling)

    def _sampling(self, index: int) -> tuple[Sampling, Sampling]:
        """What the request says, and the seed that is drawn where it names none."""
        asked = self.request
        temperature = 1.0 if asked.temperature is None else asked.temperature
        sampling: Sampling = {
            "max_tokens": self.max_tokens,
            "temperature": temperature,
            "stop": asked.stop or None,
            "presence_penalty": asked.presence_penalty or None,
            "frequency_penalty": asked.frequency_penalty or None,
            "repetition_penalty": asked.repetition_penalty,
            "min_tokens": asked.min_tokens,
            "bad_words": asked.bad_words or None,
            "log_probs": asked.wants_log_probs or None,
            **_guide(asked),
        }
        if temperature == 0:
            return sampling, {}
        sampling |= {"top_p": asked.top_p or 1.0, "top_k": asked.top_k or 0}
        if asked.seed is None:
            return sampling, {"seed": secrets.randbits(_SEED_BITS)}
        sampling["seed"] = (asked.seed + index * _SEED_STEP) % 2**_SEED_BITS
        return sampling, {}


def _guide(asked: _Generation) -> Sampling:
    """The structure that an answer must have."""
    form = asked.response_format if isinstance(asked, ChatRequest) else None
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"guide_type": "json"}
    if form.json_schema is None:
        raise ApiError(400, "response_format.json_schema: is missing", param="response_format")
    return {"guide_type": "json_schema", "guide": json.dumps(form.json_schema.schema_)}


async def merged(
    streams: Sequence[AsyncStream | AsyncCachedStream],
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """The chunks of all choices, as they come."""
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | None]] = asyncio.Queue()

    async def read(index: int) -> None:
        async for chunk in streams[index]:
            queue.put_nowait((index, chunk))
        queue.put_nowait((index, None))

    async with asyncio.TaskGroup() as group:
        for index in range(len(streams)):
            group.create_task(read(index))
        left = len(streams)
        while left:
            index, new = await queue.get()
            if new is None:
                left -= 1
            else:
                yield index, new


def usage(job: Job, stats: Sequence[Stats]) -> dict[str, Any]:
    """Tokens of the prompt and of all choices; those of the prompt are counted once."""
    completion = sum(one.output_tokens or 0 for one in stats)
    cached = sum(job.prompt_tokens for one in stats if one.cached) and job.prompt_tokens
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": job.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
