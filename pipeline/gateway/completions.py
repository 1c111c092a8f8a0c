"""POST /v1/chat/completions and /v1/completions: streamed as events, or whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pipeline.cache.aio import AsyncCachedStream
from pipeline.client import AsyncStream, Chunk, Stats
from pipeline.gateway.generation import Job, merged, usage
from pipeline.gateway.log_probs import chat_log_probs, text_log_probs
from pipeline.gateway.schema import ChatRequest, CompletionRequest
from pipeline.gateway.served import Served
from pipeline.gateway.sse import DONE, ChunkWriter
from pipeline.gateway.tenants import Tenant

Streams = Sequence[AsyncStream | AsyncCachedStream]


class Completion:
    """One request to either endpoint."""

    def __init__(
        self, request: ChatRequest | CompletionRequest, served: Served, tenant: Tenant, prompt: Any
    ) -> None:
        self.chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.stats: list[Stats] = []  # of each choice, when it is over
        self._request, self._created = request, int(time.time())
        tools = (
            (request.tools or [])
            if isinstance(request, ChatRequest) and request.tool_choice != "none"
            else []
        )
        self.job = Job(served, tenant, request, prompt, tools, served.prompt_tokens(prompt, tools), self.id)

    async def whole(self) -> Mapping[str, Any]:
        """The answer as one object."""
        chunks: list[list[Chunk]] = [[] for _ in range(self.job.choices)]
        async with self.job.running() as streams:
            async with aclosing(merged(streams)) as parts:
                async for index, chunk in parts:
                    chunks[index].append(chunk)
            choices = [self._choice(index, chunks[index]) for index in range(len(streams))]
            self.stats = [stream.stats for stream in streams]
            figures = usage(self.job, self.stats)
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": figures}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events, each chunk as soon as it is there."""
        request = self._request
        with_usage = request.stream_options is not None and request.stream_options.include_usage
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        writer = ChunkWriter({**head, "usage": None} if with_usage else head, chat=self.chat)
        async with self.job.running() as streams:
            if self.chat:
                for index in range(len(streams)):
                    yield writer.choice(
                        index, delta={"role": "assistant", "content": ""}, logprobs=None, finish_reason=None
                    )
            async with aclosing(merged(streams)) as parts:
                async for index, chunk in parts:
                    yield self._event(writer, index, chunk)
            self.stats = [stream.stats for stream in streams]
            if with_usage:
                yield ChunkWriter(head, chat=self.chat).end(usage=usage(self.job, self.stats))
        yield DONE

    def _event(self, writer: ChunkWriter, index: int, chunk: Chunk) -> bytes:
        if chunk.finish_reason is None and chunk.log_probs is None:
            return writer.text(index, chunk.text)
        fields: dict[str, Any] = (
            {"delta": {"content": chunk.text} if chunk.text else {}} if self.chat else {"text": chunk.text}
        )
        return writer.choice(index, **fields, logprobs=self._log_probs([chunk]), finish_reason=_reason(chunk))

    def _choice(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        text = "".join(chunk.text for chunk in chunks)
        content = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self.chat
            else {"text": text}
        )
        return {
            "index": index,
            **content,
            "logprobs": self._log_probs(chunks),
            "finish_reason": _reason(chunks[-1]),
        }

    def _log_probs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        if not self._request.wants_log_probs:
            return None
        return (chat_log_probs if self.chat else text_log_probs)(chunks, self.job.served.tokenizer)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.job.served.name}


def _reason(chunk: Chunk) -> str | None:
    """OpenAI knows no "unknown"."""
    return "stop" if chunk.finish_reason == "unknown" else chunk.finish_reason
