"""POST /v1/chat/completions and /v1/completions: streamed as events, or whole."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pipeline.cache.response_cache import ResponseCache
from pipeline.client import Cached, Chunk, Sampling
from pipeline.gateway.errors import ApiError
from pipeline.gateway.generation import Job, Prompt, usage
from pipeline.gateway.log_probs import chat_log_probs, text_log_probs
from pipeline.gateway.messages import read_messages
from pipeline.gateway.response_delta import Said
from pipeline.gateway.response_format import guide_of
from pipeline.gateway.schema import ChatRequest, CompletionRequest
from pipeline.gateway.served import Served
from pipeline.gateway.sse import DONE, ChunkWriter
from pipeline.gateway.tenants import Tenant
from pipeline.gateway.tools.choice import Toolbox, toolbox


class Completion:
    """One request to either endpoint. It can be made in any thread; the rest is for the event loop."""

    def __init__(
        self, request: ChatRequest | CompletionRequest, served: Served, tenant: Tenant, request_id: str
    ) -> None:
        """
        Raises:
            ApiError: 400, with what is wrong.
            PromptTooLong: a prompt has more tokens than the engine takes.
            ClientError: the template does not take the messages.
        """
        self.chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{request_id}"
        self.cached: Cached | None = None  # where the first chunk came from, if not from the model
        self._request, self._created = request, int(time.time())
        if isinstance(request, ChatRequest) and served.template is None:
            text = "This model has no chat template: ask /v1/completions"
            raise ApiError(400, text, param="model", code="unsupported_parameter")
        given = [read_messages(request.messages)] if isinstance(request, ChatRequest) else request.prompts
        tenant.check(len(given) * (request.n or 1))
        box = toolbox(request, served.template) if isinstance(request, ChatRequest) else Toolbox()
        prompts = [Prompt(one, *served.prompt(one, box.tools)) for one in given]
        _check_ttl(request.ttl_s, served.cache)
        guide: Sampling = {**guide_of(request.response_format), **box.sampling}
        self.job = Job(served, tenant, request, prompts, box, guide, request_id)
        self._said = [Said(self.job, index) for index in range(self.job.choices)]

    @property
    def streams(self) -> bool:
        """Whether the answer was asked for as events."""
        return bool(self._request.stream)

    async def whole(self) -> Mapping[str, Any]:
        """The answer as one object."""
        chunks: list[list[Chunk]] = [[] for _ in range(self.job.choices)]
        async with aclosing(self.job.chunks()) as parts:
            async for index, chunk in parts:
                self.cached = self.cached or chunk.cached
                chunks[index].append(chunk)
        choices = [self._choice(index, chunks[index]) for index in range(self.job.choices)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(self.job)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, each chunk as soon as it is there."""
        options = self._request.stream_options
        with_usage = options is not None and options.include_usage
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        writer = ChunkWriter({**head, "usage": None} if with_usage else head, chat=self.chat)
        async with aclosing(self.job.chunks()) as parts:
            async for index, chunk in parts:
                self.cached = self.cached or chunk.cached
                if event := self._event(writer, index, chunk):
                    yield event
        if with_usage:
            yield ChunkWriter(head, chat=self.chat).end(usage=usage(self.job))
        yield DONE

    def _event(self, writer: ChunkWriter, index: int, chunk: Chunk) -> bytes:
        """What a chunk adds: one event as a rule, more with the first, none if it may be part of a call."""
        said = self._said[index]
        plain = said.begun and said.reader is None and chunk.finish_reason is None and chunk.log_probs is None
        if plain:
            return writer.text(index, chunk.text)
        deltas = said.deltas(chunk)
        reason = said.reason(chunk)
        log_probs = self._log_probs([chunk]) if chunk.log_probs else None
        if (reason or log_probs) and not deltas:
            deltas = [{} if self.chat else {"text": ""}]
        last = len(deltas) - 1
        return b"".join(
            writer.choice(
                index,
                **({"delta": delta} if self.chat else delta),
                logprobs=log_probs if at == last else None,
                finish_reason=reason if at == last else None,
            )
            for at, delta in enumerate(deltas)
        )

    def _choice(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        said = self._said[index]
        content = said.whole(chunks)
        return {
            "index": index,
            **({"message": content} if self.chat else content),
            "logprobs": self._log_probs(chunks),
            "finish_reason": said.reason(chunks[-1]),
        }

    def _log_probs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        if not self._request.wants_log_probs:
            return None
        return (chat_log_probs if self.chat else text_log_probs)(chunks, self.job.served.tokenizer)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.job.served.name}


def _check_ttl(ttl_s: float | None, cache: ResponseCache | None) -> None:
    """Where there is no cache, nothing is served again, for however short a time.

    Raises:
        ApiError: 400, if a request wants its answer kept for longer than the recipe allows.
    """
    if ttl_s is None or cache is None or ttl_s <= cache.lifetime.static_s:
        return
    text = f"ttl_s: {ttl_s:g} is too long; this deployment keeps answers for at most {cache.lifetime.static_s:g} s"
    raise ApiError(400, text, param="ttl_s")
