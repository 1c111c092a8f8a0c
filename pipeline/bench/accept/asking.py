"""Requests to a deployment under test that no load is made of: streams that are left, and the gateway's."""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.request
from collections.abc import Sequence

from pipeline.client import AsyncClient, Message, Sampling, Timeouts

TIMEOUTS = Timeouts(connect_s=30.0, first_token_s=300.0, between_tokens_s=120.0)
_TIMEOUT_S = 300.0


async def leave_streams(
    url: str, model: str, prompts: Sequence[str], sampling: Sampling, streams: int
) -> int:
    """Begin so many long answers, and leave each after its first text, when all have one.

    Args:
        url: gRPC address, host:port.
        model: that is asked.
        prompts: asked in turns.
        sampling: of all of them.
        streams: how many.

    Returns:
        How many had a first text.
    """
    endless, begun, go = itertools.cycle(prompts), 0, asyncio.Event()

    async def visit(client: AsyncClient) -> None:
        nonlocal begun
        async with client.stream(next(endless), **sampling) as stream:
            async for chunk in stream:
                if chunk.text:
                    begun += 1
                    break
            if begun >= streams:
                go.set()
            await asyncio.wait_for(go.wait(), _TIMEOUT_S)

    async with AsyncClient(url, model=model, timeouts=TIMEOUTS) as client, asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(visit(client))
    return begun


def gateway_answer(url: str, model: str, messages: Sequence[Message], max_tokens: int) -> tuple[str, int]:
    """Ask an OpenAI gateway for a greedy streamed answer, with the standard library alone.

    Args:
        url: of the gateway, without /v1.
        model: name of the recipe.
        messages: the chat so far.
        max_tokens: of the answer, at most.

    Returns:
        Its text, and the number of events that had a part of it.

    Raises:
        OSError: nothing answers, or with an error.
        ValueError: the stream is not one of server-sent events with JSON, or has no end.
    """
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    parts, ended = list[str](), False
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if ended := line.strip() == b"data: [DONE]":
                break
            event = json.loads(line[6:])
            parts += [choice["delta"].get("content") or "" for choice in event.get("choices", [])]
    if not ended:
        raise ValueError("the stream ended without [DONE]")
    told = [part for part in parts if part]
    return "".join(told), len(told)
