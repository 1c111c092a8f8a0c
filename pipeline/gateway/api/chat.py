"""POST /v1/chat/completions and /v1/completions: from a request to the JSON of its answer, streamed or whole.

The model generates chunks of each choice (`pipeline.gateway.api.generation`). Here they become OpenAI's objects: deltas
and messages, tool calls, log probabilities, finish reasons, usage.

The models of answers describe them at /openapi.json. Answers themselves are plain dictionaries, some of them for each
token; `tests/clients/test_schemathesis.py` holds them to these models.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from pipeline.client import Chunk, FinishReason
from pipeline.gateway.api.choice import generate
from pipeline.gateway.api.generation import Generation
from pipeline.gateway.api.log_probs import chat_log_probs, prompt_log_probs, text_log_probs
from pipeline.gateway.api.model_answer import AnswerContext, GeneratingEndpoints, ModelAnswer
from pipeline.gateway.api.prompts import echoed_text, read_messages
from pipeline.gateway.api.schema import ChatRequest, CompletionRequest
from pipeline.gateway.api.sse import DONE, ChunkEncoder
from pipeline.gateway.api.tools.parser import AnswerParser
from pipeline.gateway.api.tools.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from pipeline.gateway.web import ApiRoute


class TokenUsage(BaseModel):
    """Tokens of all prompts, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None


class CalledFunction(BaseModel):
    """Function of a call; the arguments are JSON, as text."""

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
    reasoning_content: str | None = None
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


class CompletionEndpoints(GeneratingEndpoints):
    """Chats and plain completions."""

    @ApiRoute(
        "POST", "/v1/chat/completions", "Answer a chat.", request=ChatRequest, response=ChatAnswer, direct=True
    )  # fmt: skip
    async def _chat(self, request: Request) -> Response:
        return await self.generate(request, ChatRequest, Completion, prompt_field="messages")

    @ApiRoute(
        "POST", "/v1/completions", "Continue a text.",
        request=CompletionRequest, response=CompletionAnswer, direct=True,
    )  # fmt: skip
    async def _complete(self, request: Request) -> Response:
        return await self.generate(request, CompletionRequest, Completion, prompt_field="prompt")


class Completion(ModelAnswer):
    """Answer to a request to either endpoint."""

    def __init__(self, request: ChatRequest | CompletionRequest, context: AnswerContext) -> None:
        self.chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{context.record.id}"
        self._request, self._created = request, int(time.time())
        # The engine generates at least one token. Who asks for none wants the prompt alone.
        self._echo_only = request.output_token_limit == 0
        contents = [read_messages(request.messages)] if isinstance(request, ChatRequest) else request.prompts
        super().__init__(context.generation(request, contents))
        self._choices = [ChoiceBuilder(self.generation, index) for index in range(self.generation.choices)]

    async def whole(self) -> Mapping[str, Any]:
        chunks: list[list[Chunk]] = [[] for _ in self._choices]
        async with aclosing(generate(self.generation)) as pairs:
            async for index, chunk in pairs:
                self.cached = self.cached or chunk.cached
                chunks[index].append(_without_text(chunk) if self._echo_only else chunk)
        # Long answers, and log probabilities of prompts: other streams go on meanwhile.
        return await asyncio.to_thread(self._body, chunks)

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self._request.stream_options
        with_usage = options is not None and options.include_usage
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        self._encoder = ChunkEncoder({**head, "usage": None} if with_usage else head, chat=self.chat)
        async with aclosing(generate(self.generation)) as pairs:
            async for index, chunk in pairs:
                self.cached = self.cached or chunk.cached
                if chunk.prompt_log_probs is not None:
                    # As many tokens as the prompt has: other streams go on meanwhile.
                    yield await asyncio.to_thread(self._event, index, chunk)
                elif event := self._event(index, chunk):
                    yield event
        if with_usage:
            usage = await self.generation.usage_aside()
            yield ChunkEncoder(head, chat=self.chat).end(usage=usage)
        yield DONE

    def chunk_event(self, chunk: Chunk) -> bytes:
        return self._event(0, chunk)

    def _event(self, index: int, chunk: Chunk) -> bytes:
        """Encode a chunk: one event as a rule, several for the first, none if the text may be part of a call."""
        choice, encoder = self._choices[index], self._encoder
        if self._echo_only:
            chunk = _without_text(chunk)
        if choice.begun and choice.parser is None and chunk.finish_reason is None and chunk.log_probs is None:
            return encoder.text(index, chunk.text)
        deltas = choice.deltas(chunk)
        reason = choice.finish_reason(chunk)
        log_probs = choice.log_probs([chunk]) if chunk.log_probs or chunk.prompt_log_probs else None
        if not reason and not log_probs and len(deltas) == 1 and deltas[0].keys() == {"content"}:
            return encoder.text(index, deltas[0]["content"])
        if (reason or log_probs) and not deltas:
            deltas = [{} if self.chat else {"text": ""}]
        last = len(deltas) - 1
        return b"".join(
            encoder.choice(
                index,
                **({"delta": delta} if self.chat else delta),
                logprobs=log_probs if at == last else None,
                finish_reason=reason if at == last else None,
            )
            for at, delta in enumerate(deltas)
        )

    def _body(self, chunks: Sequence[Sequence[Chunk]]) -> Mapping[str, Any]:
        """The object of a whole answer, of the chunks of all that was generated."""
        best = self._best(chunks)
        choices = [self._whole_choice(place, index, chunks[index]) for place, index in enumerate(best)]
        kind = "chat.completion" if self.chat else "text_completion"
        body = {**self._head(kind), "choices": choices, "usage": self.generation.usage()}
        if self.chat and self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._choices[best[0]].prompt_log_probs(chunks[best[0]])
        return body

    def _best(self, chunks: Sequence[Sequence[Chunk]]) -> list[int]:
        """Choose among the answers to each prompt those whose tokens are the most probable on average."""
        candidates, choices = self._request.candidates, self._request.choices
        if candidates == choices:
            return list(range(len(chunks)))
        ranked = [
            sorted(
                range(first, first + candidates),
                key=lambda index: _mean_log_prob(chunks[index]),
                reverse=True,
            )
            for first in range(0, len(chunks), candidates)
        ]
        return [index for group in ranked for index in group[:choices]]

    def _whole_choice(self, place: int, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        choice = self._choices[index]
        content = choice.whole(chunks)
        written = {
            "index": place,
            **({"message": content} if self.chat else content),
            "logprobs": choice.log_probs(chunks),
            "finish_reason": choice.finish_reason(chunks[-1]),
        }
        if not self.chat and self._request.prompt_logprobs is not None:
            written["prompt_logprobs"] = choice.prompt_log_probs(chunks)
        return written

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.generation.model_name}


class ChoiceBuilder:
    """Builds one choice out of its chunks: `deltas` for a stream, or `whole`; never both."""

    def __init__(self, generation: Generation, index: int) -> None:
        self.chat = isinstance(generation.request, ChatRequest)
        self.begun = False
        self.parser: AnswerParser | None = None
        self._generation, self._index = generation, index
        self._shows_reasoning = generation.request.include_reasoning is not False
        self._echoed = ""
        # Where the next text begins in that of the choice, as far as log probabilities are told.
        self._at = 0

    def deltas(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the deltas of a chunk; with the first, also what every answer begins with."""
        deltas: list[dict[str, Any]] = []
        key = "content" if self.chat else "text"
        if not self.begun:
            self._begin()
            if self.chat:
                deltas.append({"role": "assistant", "content": None if self.parser else ""})
            if self._echoed:
                deltas.append({key: self._echoed})
        return deltas + [
            {key if isinstance(part, TextPart) else "reasoning_content": part.text}
            if isinstance(part, TextPart | ReasoningPart)
            else {"tool_calls": [_call_delta(part)]}
            for part in self.parts([chunk])
        ]

    def whole(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return the message of a chat, or {"text"} of a completion."""
        parts = self.parts(chunks)
        text = self._echoed + "".join(part.text for part in parts if isinstance(part, TextPart))
        if not self.chat:
            return {"text": text}
        message = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := "".join(part.text for part in parts if isinstance(part, ReasoningPart)):
            message["reasoning_content"] = reasoning
        calls = [part for part in parts if isinstance(part, CallPart)]
        if not calls:
            return message
        arguments = ["" for _ in calls]
        for part in parts:
            if isinstance(part, ArgumentsPart):
                arguments[part.index] += part.text
        tool_calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments[call.index]},
            }
            for call in calls
        ]
        return {**message, "content": text or None, "tool_calls": tool_calls}

    def finish_reason(self, chunk: Chunk) -> str | None:
        """Return OpenAI's reason to finish; None before the last chunk. OpenAI has no "unknown": it becomes "stop"."""
        if chunk.finish_reason in (None, "length"):
            return chunk.finish_reason
        return "tool_calls" if self.parser is not None and self.parser.calls else "stop"

    def log_probs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        """Return the log probabilities of chunks after those already sent; None if they are not requested."""
        request, tokenizer = self._generation.request, self._generation.model.tokenizer
        if not request.wants_log_probs:
            return None
        if self.chat:
            return chat_log_probs(chunks, tokenizer)
        start, self._at = self._at, self._at + sum(len(chunk.text) for chunk in chunks)
        return text_log_probs(
            chunks,
            tokenizer,
            start=start,
            echoed=self._echoed,
            num_alternatives=request.num_top_logprobs,
        )

    def prompt_log_probs(self, chunks: Sequence[Chunk]) -> list[Any] | None:
        """Return vLLM's `prompt_logprobs` of a whole answer; None if the engine gave none."""
        request, log_probs = self._generation.request, chunks[0].prompt_log_probs
        if log_probs is None:
            return None
        return prompt_log_probs(log_probs, self._generation.model.tokenizer, request.prompt_logprobs or 0)

    def parts(self, chunks: Sequence[Chunk]) -> list[Part]:
        """Cut the next chunks into reasoning, texts and calls."""
        if not self.begun:
            self._begin()
        if self.parser is None:
            return [TextPart(text)] if (text := "".join(chunk.text for chunk in chunks)) else []
        parts = [part for chunk in chunks for part in self.parser.feed(chunk.text)]
        if reason := chunks[-1].finish_reason:
            parts += self.parser.end(cut=reason == "length")
        if reasoning := [part.text for part in parts if isinstance(part, ReasoningPart)]:
            self._generation.reasoning.setdefault(self._index, []).extend(reasoning)
            if not self._shows_reasoning:
                parts = [part for part in parts if not isinstance(part, ReasoningPart)]
        return parts

    def _begin(self) -> None:
        """Only with its first chunk is it certain which model generates the choice."""
        generation = self._generation
        self.begun, self.parser = True, generation.answer_parser(self._index)
        self._echoed = echoed_text(generation.request, generation.prompt_of(self._index), generation.model)
        self._at = len(self._echoed)


def _call_delta(part: CallPart | ArgumentsPart) -> dict[str, Any]:
    if isinstance(part, CallPart):
        function = {"name": part.name, "arguments": ""}
        return {"index": part.index, "id": part.id, "type": "function", "function": function}
    return {"index": part.index, "function": {"arguments": part.text}}


def _without_text(chunk: Chunk) -> Chunk:
    """A chunk of an answer that is to have no tokens: what it says of the prompt."""
    ended: FinishReason | None = "length" if chunk.finish_reason else None
    return replace(chunk, text="", finish_reason=ended, log_probs=None, top_log_probs=None, token_ids=None)


def _mean_log_prob(chunks: Sequence[Chunk]) -> float:
    """Return the mean log probability of an answer's tokens; -inf if it has none."""
    values = [value for chunk in chunks for value in chunk.log_probs or ()]
    return sum(values) / len(values) if values else -math.inf
