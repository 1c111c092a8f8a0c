"""POST /v1/chat/completions and /v1/completions: from a request to the JSON of its answer, streamed or whole.

The model generates chunks of each choice (`pipeline.gateway.generation`). Here they become OpenAI's objects: deltas and
messages, tool calls, log probabilities, finish reasons, usage.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from pipeline.client import Cached, Chunk
from pipeline.gateway.generation import Generation
from pipeline.gateway.limits import Tenant
from pipeline.gateway.schema import ChatRequest, CompletionRequest, read_messages
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.sse import DONE, ChunkEncoder
from pipeline.gateway.tools.parser import ArgumentsPart, CallPart, Part, TextPart, ToolCallParser
from pipeline.gateway.traces import Span


class Completion:
    """One request to either endpoint. It may be made in any thread; its methods are for the event loop."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        model: ServedModel,
        tenant: Tenant,
        request_id: str,
        span: Span,
    ) -> None:
        """Check the request, render its prompts, and count their tokens.

        Args:
            request: of the client.
            model: that it names.
            tenant: whose request it is.
            request_id: unique among all requests.
            span: of the request.

        Raises:
            ApiError: 400, with what is wrong.
            PromptTooLong: a prompt has more tokens than the engine takes.
            ClientError: the template does not take the messages.
        """
        self.chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{request_id}"
        self.cached: Cached | None = None  # where the first chunk came from, if not from the model
        self._request, self._created = request, int(time.time())
        contents = [read_messages(request.messages)] if isinstance(request, ChatRequest) else request.prompts
        tenant.check_choices(len(contents) * (request.n or 1))
        self.generation = Generation(model, tenant, request, contents, request_id, span)
        self._choices = [ChoiceBuilder(self.generation, index) for index in range(self.generation.choices)]

    @property
    def streams(self) -> bool:
        """Whether the answer is to be streamed."""
        return bool(self._request.stream)

    async def whole(self) -> Mapping[str, Any]:
        """Generate the whole answer, and return it as one object."""
        chunks: list[list[Chunk]] = [[] for _ in self._choices]
        async with aclosing(self.generation.chunks()) as pairs:
            async for index, chunk in pairs:
                self.cached = self.cached or chunk.cached
                chunks[index].append(chunk)
        choices = [self._whole_choice(index, chunks[index]) for index in range(len(chunks))]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.generation.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Generate the answer as server-sent events, each as soon as its chunk has come."""
        options = self._request.stream_options
        with_usage = options is not None and options.include_usage
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        encoder = ChunkEncoder({**head, "usage": None} if with_usage else head, chat=self.chat)
        async with aclosing(self.generation.chunks()) as pairs:
            async for index, chunk in pairs:
                self.cached = self.cached or chunk.cached
                if event := self._event(encoder, index, chunk):
                    yield event
        if with_usage:
            yield ChunkEncoder(head, chat=self.chat).end(usage=self.generation.usage())
        yield DONE

    def _event(self, encoder: ChunkEncoder, index: int, chunk: Chunk) -> bytes:
        """Encode a chunk: one event as a rule, several for the first, none if the text may be part of a call."""
        choice = self._choices[index]
        if choice.begun and choice.parser is None and chunk.finish_reason is None and chunk.log_probs is None:
            return encoder.text(index, chunk.text)
        deltas = choice.deltas(chunk)
        reason = choice.finish_reason(chunk)
        log_probs = self._log_probs([chunk]) if chunk.log_probs else None
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

    def _whole_choice(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        choice = self._choices[index]
        content = choice.whole(chunks)
        return {
            "index": index,
            **({"message": content} if self.chat else content),
            "logprobs": self._log_probs(chunks),
            "finish_reason": choice.finish_reason(chunks[-1]),
        }

    def _log_probs(self, chunks: Sequence[Chunk]) -> dict[str, Any] | None:
        if not self._request.wants_log_probs:
            return None
        return (chat_log_probs if self.chat else text_log_probs)(
            chunks, self.generation.model.prompt_limit.tokenizer
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.generation.model.name}


class ChoiceBuilder:
    """Builds one choice out of its chunks: `deltas` for a stream, or `whole`; never both."""

    def __init__(self, generation: Generation, index: int) -> None:
        """
        Args:
            generation: of the request.
            index: of the choice.
        """
        request = generation.request
        self.chat = isinstance(request, ChatRequest)
        self.begun = False
        self.parser: ToolCallParser | None = None
        self._generation = generation
        echo = isinstance(request, CompletionRequest) and request.echo
        prompt = generation.prompt_of(index).content
        self._echoed = prompt if echo and isinstance(prompt, str) else ""

    def deltas(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the deltas of a chunk; with the first, also what every answer begins with."""
        deltas: list[dict[str, Any]] = []
        if not self.begun:
            self._begin()
            if self.chat:
                deltas.append({"role": "assistant", "content": None if self.parser else ""})
            elif self._echoed:
                deltas.append({"text": self._echoed})
        key = "content" if self.chat else "text"
        return deltas + [
            {key: part.text} if isinstance(part, TextPart) else {"tool_calls": [_call_delta(part)]}
            for part in self._parse([chunk])
        ]

    def whole(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return the message of a chat, or {"text"} of a completion."""
        self._begin()
        parts = self._parse(chunks)
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        if not self.chat:
            return {"text": self._echoed + text}
        message = {"role": "assistant", "content": text, "refusal": None}
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

    def _begin(self) -> None:
        """Only with its first chunk is it certain which model generates the choice."""
        self.begun, self.parser = True, self._generation.tools.parser()

    def _parse(self, chunks: Sequence[Chunk]) -> list[Part]:
        if self.parser is None:
            return [TextPart(text)] if (text := "".join(chunk.text for chunk in chunks)) else []
        parts = [part for chunk in chunks for part in self.parser.feed(chunk.text)]
        return parts + self.parser.end() if chunks[-1].finish_reason else parts


def _call_delta(part: CallPart | ArgumentsPart) -> dict[str, Any]:
    if isinstance(part, CallPart):
        function = {"name": part.name, "arguments": ""}
        return {"index": part.index, "id": part.id, "type": "function", "function": function}
    return {"index": part.index, "function": {"arguments": part.text}}


class _TokenLogProbs(NamedTuple):
    text: str
    log_prob: float
    alternatives: Sequence[tuple[int, float]] = ()  # ids and log probabilities at the same position


def chat_log_probs(chunks: Sequence[Chunk], tokenizer: Any) -> dict[str, Any]:
    """Log probabilities as chats have them.

    Args:
        chunks: of one choice.
        tokenizer: `tokenizers.Tokenizer` of the model.

    Returns:
        {"content": [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}]}
    """
    content = [
        {
            **_chat_token(token.text, token.log_prob),
            "top_logprobs": [
                _chat_token(_token_text(id, tokenizer), log_prob) for id, log_prob in token.alternatives
            ],
        }
        for token in _tokens(chunks, tokenizer)
    ]
    return {"content": content, "refusal": None}


def text_log_probs(chunks: Sequence[Chunk], tokenizer: Any) -> dict[str, Any]:
    """Log probabilities as plain completions have them.

    Args:
        chunks: of one choice.
        tokenizer: `tokenizers.Tokenizer` of the model.

    Returns:
        {"tokens", "token_logprobs", "text_offset", "top_logprobs"}
    """
    tokens = list(_tokens(chunks, tokenizer))
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token.text)
    tops = [{_token_text(id, tokenizer): log_prob for id, log_prob in token.alternatives} for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "text_offset": offsets,
        "top_logprobs": tops if any(tops) else None,
    }


def _chat_token(text: str, log_prob: float) -> dict[str, Any]:
    """A token that is a part of a character has no text of its own, and its bytes are not known."""
    return {"token": text, "logprob": log_prob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _token_text(id: int, tokenizer: Any) -> str:
    """Text of a token within a text: some tokenizers drop the space before the first token."""
    before = tokenizer.encode("a", add_special_tokens=False).ids
    start = tokenizer.decode(before, skip_special_tokens=False)
    text: str = tokenizer.decode([*before, id], skip_special_tokens=False)
    return text[len(start) :]


def _tokens(chunks: Sequence[Chunk], tokenizer: Any) -> Iterator[_TokenLogProbs]:
    """Each token. If the text of a chunk cannot be divided among its tokens, the first one has all of it."""
    for chunk in chunks:
        values = chunk.log_probs or ()
        texts = [chunk.text]
        if len(values) > 1:
            offsets = tokenizer.encode(chunk.text, add_special_tokens=False).offsets
            if len(offsets) == len(values):
                texts = [chunk.text[start:end] for start, end in offsets]
        tops = chunk.top_log_probs or ()
        for index, value in enumerate(values):
            text = texts[index] if index < len(texts) else ""
            yield _TokenLogProbs(text, value, tops[index] if index < len(tops) else ())
