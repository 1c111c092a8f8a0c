"""One request to the model, as several choices if so asked, under the limits of tenant and deployment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pipeline.cache.aio import AsyncCachedStream, AsyncCachingClient
from pipeline.client import AsyncStream, Chunk, Refused, Sampling, Stats
from pipeline.gateway.response_format import refusal
from pipeline.gateway.schema import Generation
from pipeline.gateway.served import Served
from pipeline.gateway.tenants import Tenant
from pipeline.gateway.tools.choice import Toolbox

_SEED_BITS = 63
_SEED_STEP = 0x9E3779B97F4A7C15  # so that choices of one seed differ


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or messages for the template; what the template makes of them, and how many tokens that is."""

    content: str | Sequence[dict[str, Any]]
    text: str
    tokens: int


@dataclass(slots=True)
class Job:
    """What is to be generated. Choices are numbered as OpenAI does: all of the first prompt, then all of the next."""

    served: Served
    tenant: Tenant
    request: Generation
    prompts: Sequence[Prompt]
    toolbox: Toolbox
    guide: Sampling  # the form that each answer must have
    request_id: str
    stats: dict[int, Stats] = field(default_factory=dict)  # of each choice that was begun, when it is over

    @property
    def max_tokens(self) -> int:
        """Of each choice."""
        most = self.served.bounds.max_output_tokens
        return min(self.request.limit or most, most)

    @property
    def choices(self) -> int:
        """How many."""
        return len(self.prompts) * (self.request.n or 1)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts together; each counts once, however many choices it has."""
        return sum(prompt.tokens for prompt in self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """The one that choice `index` answers."""
        return self.prompts[index // (self.request.n or 1)]

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """The chunks of all choices, as they come; each choice waits for a place of its own.

        Raises:
            ApiError, ClientError, or an ExceptionGroup of them if there are several choices.
        """
        tokens = sum(self.prompt_of(index).tokens + self.max_tokens for index in range(self.choices))
        with self.tenant.request(tokens, self.choices):
            if self.choices > 1:
                async with aclosing(self._merged()) as pairs:
                    async for pair in pairs:
                        yield pair
                return
            async with aclosing(self._choice(0)) as chunks:
                async for chunk in chunks:
                    yield 0, chunk

    async def _merged(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        queue: asyncio.Queue[tuple[int, Chunk | None]] = asyncio.Queue()

        async def read(index: int) -> None:
            async with aclosing(self._choice(index)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((index, chunk))
            queue.put_nowait((index, None))

        async with asyncio.TaskGroup() as group:
            for index in range(self.choices):
                group.create_task(read(index))
            left = self.choices
            while left:
                index, new = await queue.get()
                if new is None:
                    left -= 1
                else:
                    yield index, new

    async def _choice(self, index: int) -> AsyncGenerator[Chunk, None]:
        sampling, drawn = self._sampling(index)
        await self.served.able(sampling)
        tokens = self.prompt_of(index).tokens + self.max_tokens
        place = self.served.admission.place(tokens, self.tenant.name)
        async with place, self._stream(index, sampling, drawn) as stream:
            begun = False
            try:
                async for chunk in stream:
                    begun = True
                    yield chunk
            except Refused as error:
                if told := refusal(error, self.request.response_format):
                    raise told from error
                raise
            finally:
                if begun:
                    self.stats[index] = stream.stats

    def _stream(self, index: int, sampling: Sampling, drawn: Sampling) -> AsyncStream | AsyncCachedStream:
        client, prompt = self.served.client(self.tenant.name), self.prompt_of(index)
        request_id = self.request_id if self.choices == 1 else f"{self.request_id}-{index}"
        if isinstance(client, AsyncCachingClient):
            return client.stream(
                prompt.content,
                request_id=request_id,
                tools=self.toolbox.tools,
                rendered=prompt.text,
                cache=self.request.cache,
                ttl_s=self.request.ttl_s,
                unkeyed=drawn,
                **sampling,
            )
        sampling.update(drawn)
        return client.stream(prompt.text, request_id=request_id, **sampling)

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
            "top_log_probs": asked.likeliest or None,
            **self.guide,
        }
        if temperature == 0:
            return sampling, {}
        sampling |= {"top_p": asked.top_p or 1.0, "top_k": asked.top_k or 0}
        if asked.seed is None:
            return sampling, {"seed": random.getrandbits(_SEED_BITS)}
        sampling["seed"] = (asked.seed + index % (asked.n or 1) * _SEED_STEP) % 2**_SEED_BITS
        return sampling, {}


def usage(job: Job) -> dict[str, Any]:
    """Tokens of all prompts and of all choices."""
    completion = sum(one.output_tokens or 0 for one in job.stats.values())
    cached = job.prompt_tokens if any(one.cached for one in job.stats.values()) else 0
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": job.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
