"""Servers that a benchmark asks: Triton, by our client, or any server of OpenAI's API, by server-sent events.

Both return the `Stats` of an answer, by the clock of this process.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import aiohttp

from pipeline.client import (
    AsyncClient,
    Busy,
    Cached,
    ChatTemplate,
    ClientError,
    Message,
    Refused,
    Retries,
    Sampling,
    Stats,
    Timeouts,
)
from pipeline.errors import ServerError

Outcome = Literal["complete", "left", "refused", "failed"]

_REASON_CHARACTERS = 300
_REFUSED = (400, 401, 403, 404, 413, 422, 429, 503)
_PASSING = ("HTTP 429", "HTTP 503")  # refusals of a server that is busy, or not ready yet
_SERVED_NAMED = 8  # models that a refusal names
_HELLO = aiohttp.ClientTimeout(total=30)
# Fields of a chat chunk that hold text; the last two are reasoning, as vLLM called it until 0.11 and calls it since.
_TEXTS = ("content", "reasoning_content", "reasoning")
# Values of the gateway's header x-cache.
_CACHED = {"exact": Cached("exact"), "semantic": Cached("semantic"), "shared": Cached("shared")}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request.

    Attributes:
        leaves_after: Chunks after which the client leaves; None: it stays to the end.
    """

    prompt: str | Sequence[Message]
    sampling: Sampling
    leaves_after: int | None = None


@dataclass(frozen=True, slots=True)
class BenchReply:
    """Outcome of one request.

    Attributes:
        outcome: `left` where the client left as planned; `refused` where the server turned the request away.
        stats: Times, by `time.perf_counter`, and counts; so far, if the answer was not completed.
        sent_at: Time when it was sent, by `time.perf_counter`; None if nothing came.
    """

    outcome: Outcome
    stats: Stats = field(default_factory=Stats)
    text: str = ""
    error: str = ""
    sent_at: float | None = None


class Target(Protocol):
    """A server to ask; entered as a context before it is asked."""

    async def ask(self, question: BenchRequest) -> BenchReply:
        """Send one request, and read the answer to its end."""
        ...

    async def check(self, question: BenchRequest) -> None:
        """Send one request before a load, so that a fault of all requests shows at once.

        Raises:
            ServerError: The server would refuse every such request.
        """
        ...

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *error: object) -> None: ...


class TritonTarget:
    """A model on Triton, asked over gRPC. Never retries a request: failures are counted."""

    def __init__(self, url: str, model: str, tokenizer: Path | None, *, timeout_s: float) -> None:
        """Prepare a client.

        Args:
            tokenizer: Folder with the chat template; None where only texts are asked.
        """
        self._client = AsyncClient(
            url,
            model=model,
            template=None if tokenizer is None else ChatTemplate.from_directory(tokenizer),
            retries=Retries(attempts=1),
            timeouts=Timeouts(connect_s=30.0, first_token_s=timeout_s, between_tokens_s=timeout_s),
        )

    async def ask(self, question: BenchRequest) -> BenchReply:
        stream = self._client.stream(question.prompt, **question.sampling)
        chunks = 0
        outcome: Outcome = "complete"
        reason = ""
        try:
            async with stream:
                async for _ in stream:
                    chunks += 1
                    if question.leaves_after is not None and chunks >= question.leaves_after:
                        outcome = "left"
                        break
        except ClientError as error:
            outcome = "refused" if isinstance(error, Refused | Busy) else "failed"
            reason = str(error)[:_REASON_CHARACTERS]
            if not chunks:
                # It may not even have been sent, and then has no figures.
                return BenchReply(outcome, error=reason)
        return BenchReply(outcome, stream.stats, stream.text, reason, stream.sent_at)

    async def check(self, question: BenchRequest) -> None:
        """Do nothing: entering the context asked the server for its model already."""

    async def __aenter__(self) -> Self:
        try:
            await self._client.model()
        except ClientError as error:
            await self._client.aclose()
            raise ServerError(str(error)) from error
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()


class OpenAITarget:
    """A server of OpenAI's API: ours, or any other.

    Attributes:
        served: Models that it lists, once it is entered.
    """

    def __init__(
        self, url: str, model: str, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        """Prepare a client."""
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        self._model, self._timeout_s, self._headers = model, timeout_s, dict(headers or {})
        self.served: tuple[str, ...] = ()
        self._stack = AsyncExitStack()

    async def ask(self, question: BenchRequest) -> BenchReply:
        chat = not isinstance(question.prompt, str)
        body = {
            "model": self._model,
            "messages" if chat else "prompt": question.prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in question.sampling.items() if value is not None},
        }
        url = f"{self._url}/chat/completions" if chat else f"{self._url}/completions"
        taken = _Events()
        try:
            async with self._session.post(url, json=body) as answer:
                if answer.status != 200:
                    reason = f"HTTP {answer.status}: {await answer.text()}"
                    return taken.reply("refused" if answer.status in _REFUSED else "failed", reason)
                taken.cache = answer.headers.get("x-cache", "")
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    taken.event(line[5:].strip())
                    if question.leaves_after is not None and len(taken.times) >= question.leaves_after:
                        return taken.reply("left")
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            return taken.reply("failed", f"{type(error).__name__}: {error}")
        if taken.error or not taken.done:
            return taken.reply("failed", taken.error or "the stream ended without [DONE]")
        return taken.reply("complete")

    async def check(self, question: BenchRequest) -> None:
        reply = await self.ask(question)
        if reply.outcome == "refused" and not reply.error.startswith(_PASSING):
            served = ", ".join(self.served[:_SERVED_NAMED])
            has = f"; it serves {served}" if served and self._model not in self.served else ""
            raise ServerError(f"{self._url} refuses requests for {self._model}: {reply.error}{has}")

    async def __aenter__(self) -> Self:
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=30),
                headers=self._headers,
                read_bufsize=1 << 20,
            )
        )
        try:
            # Whatever it answers, it is there.
            async with self._session.get(f"{self._url}/models", timeout=_HELLO) as answer:
                self.served = _served(await answer.read())
                return self
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._stack.aclose()
            raise ServerError(f"{self._url} cannot be reached: {error or type(error).__name__}") from error

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()


def only_model(url: str) -> str:
    """Ask a server of OpenAI's API for the one model that it serves.

    Raises:
        ServerError: It cannot be reached, or serves none or several: the message lists them.
    """

    async def ask() -> tuple[str, ...]:
        async with OpenAITarget(url, "", timeout_s=_HELLO.total or 0.0) as target:
            return target.served

    served = asyncio.run(ask())
    if len(served) != 1:
        names = ", ".join(served[:_SERVED_NAMED]) or "none"
        raise ServerError(
            f"{url} lists {names} as its models: name one behind the address, as in {url}#model"
        )
    return served[0]


def _served(body: bytes) -> tuple[str, ...]:
    """Names of the models that a server lists; none where it answers something else."""
    try:
        return tuple(str(model["id"]) for model in json.loads(body)["data"])
    except (ValueError, TypeError, KeyError):
        return ()


class _Events:
    """The events of one answer as they come."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.times: list[float] = []
        self.parts: list[str] = []
        self.usage: Mapping[str, Any] = {}
        self.cache = self.error = ""
        self.done = False

    def event(self, data: bytes) -> None:
        """Take in the data of one event.

        Raises:
            ValueError: It is not JSON.
        """
        now = time.perf_counter()
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        # Some servers have the key in every event, and null in it.
        if event.get("error"):
            self.error = json.dumps(event["error"], ensure_ascii=False)
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            part = next((text for name in _TEXTS if (text := delta.get(name))), choice.get("text")) or ""
            if part or delta.get("tool_calls"):
                self.times.append(now)
                self.parts.append(part)

    def reply(self, outcome: Outcome, error: str = "") -> BenchReply:
        """Make the reply from what has come so far."""
        return BenchReply(outcome, self._stats(), "".join(self.parts), error[:_REASON_CHARACTERS], self.sent)

    def _stats(self) -> Stats:
        times, ended = self.times, time.perf_counter()
        kind = self.cache.partition(";")[0]
        return Stats(
            ttft_ms=(times[0] - self.sent) * 1e3 if times else None,
            itl_ms=tuple((later - earlier) * 1e3 for earlier, later in pairwise(times)),
            total_ms=(ended - self.sent) * 1e3,
            chunks=len(times),
            input_tokens=self.usage.get("prompt_tokens"),
            output_tokens=self.usage.get("completion_tokens"),
            cached=_CACHED.get(kind),
        )
