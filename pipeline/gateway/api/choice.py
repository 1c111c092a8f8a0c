"""Choices of a generation: each waits for a slot, is sent to the model, and is asked again when its server is lost.

A choice of which nothing has gone out is asked again from its start. A stream that has begun goes on where its client
is: another server, or the same server when it is back, gets the prompt and the tokens that had come (Dynamo calls it
request migration). Where that is not possible it ends with the loss: an answer that is held to a form or has
log probabilities of its prompt, a model without the inputs for it, and a model that was replaced by another package.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from pipeline.cache.client import AsyncCachedStream, AsyncCachingClient
from pipeline.client import (
    AsyncStream,
    Busy,
    Chunk,
    ConnectFailed,
    Refused,
    Retries,
    Sampling,
    ServerLost,
    Stats,
)
from pipeline.client.request import missing_inputs, takes_partial_answers
from pipeline.client.spreading import prompt_beginning
from pipeline.gateway.api.generation import ChoiceTimes, Generation
from pipeline.gateway.api.prompts import RenderedPrompt
from pipeline.gateway.background import Preempted
from pipeline.gateway.blame import MAX_LOSSES
from pipeline.gateway.errors import QUARANTINED, ApiError
from pipeline.gateway.lost_servers import took_request
from pipeline.gateway.traces import propagate

_MAX_ATTEMPTS = 3
_MAX_TRIED_S = 5.0  # most seconds that a tenant is charged for the form of one answer
_BACKOFF = Retries()


class _CannotResume(Exception):
    """The choice cannot go on where it broke off."""


async def generate(generation: Generation) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Generate all choices at once. Each waits for a slot of its own.

    Yields:
        Index of a choice, and its next chunk.

    Raises:
        ApiError, ClientError, or an ExceptionGroup of them if there are several choices.
    """
    generation.model.hold()
    try:
        await generation.follow()
        if generation.inputs.form is not None:
            generation.tenant.check_reading()
        choices = range(generation.choices)
        tokens = sum(generation.prompt_of(index).tokens + generation.max_tokens for index in choices)
        async with generation.tenant.enforce_limits(tokens, generation.choices):
            if generation.choices > 1:
                async with aclosing(_merged(generation)) as pairs:
                    async for pair in pairs:
                        yield pair
                return
            async with aclosing(_Choice(generation, 0).chunks()) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
    finally:
        generation.model.release()


async def _merged(generation: Generation) -> AsyncGenerator[tuple[int, Chunk], None]:
    arrived: asyncio.Queue[tuple[int, Chunk | None]] = asyncio.Queue()

    async def read(index: int) -> None:
        async with aclosing(_Choice(generation, index).chunks()) as chunks:
            async for chunk in chunks:
                arrived.put_nowait((index, chunk))
        arrived.put_nowait((index, None))

    async with asyncio.TaskGroup() as group:
        for index in range(generation.choices):
            group.create_task(read(index))
        running = generation.choices
        while running:
            index, chunk = await arrived.get()
            if chunk is None:
                running -= 1
            else:
                yield index, chunk


class _Choice:
    """The attempts at one choice."""

    def __init__(self, generation: Generation, index: int) -> None:
        self._generation, self._index = generation, index
        self._arrived = time.monotonic()
        self._times = generation.times[index] = ChoiceTimes(time.perf_counter())
        self._attempts = 1
        self._lost = 0  # losses of servers that it was in flight at
        self._begun = False  # whether a chunk has gone out
        # What it goes on after: the loss of its server, and the figures until then.
        self._loss: ServerLost | None = None
        self._before = Stats()
        self._paused_at: float | None = None  # last chunk before the loss, until the next one

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Generate the choice."""
        generation = self._generation
        try:
            async with aclosing(self._all_attempts()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (ServerLost, _CannotResume, ApiError) as error:
            generation.broken += self._begun
            if (
                isinstance(error, ServerLost)
                or self._loss is None
                or getattr(error, "code", None) == QUARANTINED
            ):
                raise
            raise self._loss from error
        generation.resumed += self._loss is not None

    async def _all_attempts(self) -> AsyncGenerator[Chunk, None]:
        generation = self._generation
        while True:
            try:
                async with aclosing(self._attempt()) as chunks:
                    # A whole answer is handed on when it is complete, so that it can be asked again in any state.
                    if not generation.request.stream:
                        for chunk in [chunk async for chunk in chunks]:
                            yield chunk
                    async for chunk in chunks:
                        self._begun = True
                        yield chunk
                return
            except (ConnectFailed, ServerLost, Busy) as error:
                await self._note_failure(error)
                self._attempts += 1
                generation.retries += 1
            except Preempted:
                pass
            if self._loss is None:
                generation.unbind(self._index)
                self._times = generation.times[self._index] = ChoiceTimes(self._times.requested)

    async def _note_failure(self, error: ConnectFailed | ServerLost | Busy) -> None:
        """Prepare the next attempt. Raises the error, or that of the loss before it, if there is none."""
        losses = 0
        if took_request(error):
            self._lost += 1
            losses = await self._generation.note_loss(self._lost)
        if self._attempts == _MAX_ATTEMPTS or losses >= MAX_LOSSES:
            raise error if self._loss is None or isinstance(error, ServerLost) else self._loss
        if self._begun and isinstance(error, ServerLost):
            if error.partial is None:
                raise error
            self._loss, self._before = error, self._generation.stats[self._index]
            self._times.ended, self._paused_at = None, self._times.last_chunk
        if isinstance(error, Busy):
            await asyncio.sleep(_BACKOFF.backoff_s(self._attempts))

    async def _attempt(self) -> AsyncGenerator[Chunk, None]:
        generation, index, times = self._generation, self._index, self._times
        tokens = self._prompt.tokens + generation.max_tokens
        generation.model.readiness.start()
        slot = generation.model.queue.slot(
            tokens,
            generation.tenant.name,
            wait_s=generation.model.max_wait_s,
            arrived=self._arrived,
            background=generation.tenant.background,
            work=generation.work(index),
        )
        async with slot, self._watched():
            times.started = times.started or time.perf_counter()
            if generation.inputs.form is not None:
                # Forms of the tenant may have taken too long meanwhile.
                generation.tenant.check_reading()
            if not await generation.bind(index, goes_on=self._loss is not None):
                raise _CannotResume("another package has replaced the model")
            sampling, drawn = generation.sampling(index)
            if generation.request.skip_special_tokens is not False:
                # An engine that cannot write them is parsed by what it writes.
                wanted: dict[str, Any] = {"skip_special_tokens": sampling.get("skip_special_tokens", True)}
                if missing_inputs(await generation.model.client.model(), wanted):
                    sampling["skip_special_tokens"] = None
            await generation.model.check_supported(sampling)
            if await self._can_go_on():
                drawn["token_ids"] = True
            async with self._stream(sampling, drawn) as stream:
                began = time.perf_counter()
                times.sent = times.sent or began
                if generation.take_chunk is not None and isinstance(stream, AsyncStream):
                    stream.take_chunk = self._take_chunk
                try:
                    async for chunk in stream:
                        self._note_chunk(chunk)
                        yield chunk
                except Refused as error:
                    form = generation.inputs.form
                    if form is not None and (unsupported := form.unsupported(error)):
                        # The engine may have tried for seconds to compile it.
                        tried_s = min(time.perf_counter() - began, _MAX_TRIED_S)
                        await generation.tenant.charge_reading(tried_s)
                        raise unsupported from error
                    if self._loss is not None:
                        raise _CannotResume(str(error)) from error
                    raise
                finally:
                    times.ended = time.perf_counter()
                    if times.first_chunk is not None:
                        generation.stats[index], generation.texts[index] = self._counted(stream), stream.text

    @asynccontextmanager
    async def _watched(self) -> AsyncGenerator[None, None]:
        """Count a server that is lost in the block as ill, before the slot goes to another request."""
        try:
            yield
        except (ConnectFailed, ServerLost) as error:
            self._generation.model.readiness.suspect(error.url, str(error))
            raise

    async def _can_go_on(self) -> bool:
        """Whether the choice could go on if its server were lost after it has begun."""
        generation = self._generation
        constrained = generation.inputs.form is not None or generation.request.num_prompt_logprobs is not None
        if constrained or not generation.request.stream:
            return False
        model = await generation.model.client.model()
        return model.decoupled and takes_partial_answers(model)

    def _take_chunk(self, chunk: Chunk) -> bool:
        """Hand a chunk on past the tasks that wait for it, if the answer takes it so."""
        assert self._generation.take_chunk is not None
        # Before the first has gone out, the choice may still be asked again.
        if not self._begun or not self._generation.take_chunk(chunk):
            return False
        self._note_chunk(chunk)
        return True

    def _note_chunk(self, chunk: Chunk) -> None:
        times, now = self._times, time.perf_counter()
        if times.first_chunk is None:
            times.first_chunk = now
        elif self._paused_at is not None:
            # To the client, the pause is a gap between two chunks.
            pause_ms, self._paused_at = (now - self._paused_at) * 1e3, None
            self._before = replace(self._before, itl_ms=(*self._before.itl_ms, pause_ms))
        times.last_chunk = now
        if chunk.finish_reason is not None:
            times.finish_reason = chunk.finish_reason

    def _counted(self, stream: AsyncStream | AsyncCachedStream) -> Stats:
        """The figures of a stream; where it broke off before the model counted its tokens, the tokenizer does."""
        stats = stream.stats
        if stats.output_tokens is None and stream.finish_reason is None:
            stats = replace(stats, output_tokens=self._generation.model.tokenizer.count(stream.text))
        return stats if self._loss is None else _joined(self._before, stats)

    def _stream(self, sampling: Sampling, drawn: Sampling) -> AsyncStream | AsyncCachedStream:
        generation, prompt = self._generation, self._prompt
        client = generation.model.client_for(generation.tenant.name)
        if generation.span.recording:
            name = f"{generation.operation} {generation.model.name}"
            self._times.span = span = generation.span.start_child(name, client=True)
            propagate(span)
        request_id = generation.request_id
        if generation.choices > 1:
            request_id = f"{request_id}-{self._index}"
        if isinstance(client, AsyncCachingClient) and self._loss is None:
            return client.stream(
                prompt.content,
                request_id=request_id,
                tools=generation.tools.tools,
                rendered=prompt.sent if isinstance(prompt.sent, str) else None,
                affinity=self._affinity(),
                variables=prompt.variables,
                cache=generation.request.cache,
                ttl_s=generation.request.ttl_s,
                unkeyed=drawn,
                **sampling,
            )
        sampling.update(drawn)
        prior = None if self._loss is None else self._loss.partial
        # The rest of an answer is no answer to a question that could be asked again.
        return generation.model.client.stream(
            prompt.sent, request_id=request_id, affinity=self._affinity(), prior=prior, **sampling
        )

    @property
    def _prompt(self) -> RenderedPrompt:
        return self._generation.prompt_of(self._index)

    def _affinity(self) -> str | None:
        """Key by which the turns of a conversation go to the same server; None where there is one server."""
        client = self._generation.model.client
        if client.spread != "affinity" or len(client.endpoints) < 2:
            return None
        return self._generation.request.prompt_cache_key or prompt_beginning(self._prompt.content)


def _joined(before: Stats, after: Stats) -> Stats:
    """The figures of an answer of two parts; those after the loss count the tokens of the whole."""
    return replace(
        after,
        ttft_ms=before.ttft_ms,
        itl_ms=(*before.itl_ms, *after.itl_ms),
        chunks=before.chunks + after.chunks,
        input_tokens=before.input_tokens or after.input_tokens,
        queue_ms=before.queue_ms,
        prefill_ms=before.prefill_ms,
    )
