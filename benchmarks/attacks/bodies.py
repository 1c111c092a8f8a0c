"""Attacks by the body of a request: depth, size, number of values, numbers, names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx

from benchmarks.attacks import Target, attack

CHAT = "/v1/chat/completions"


@attack("body-depth", '3 MB of [ and of {"a": to four endpoints')
async def depth(target: Target) -> None:
    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages"):
        await target.post(path, content=b"[" * 3_000_000)
        await target.post(path, content=b'{"a":' * 600_000)


@attack("body-values", "a million values, duplicate names and numbers of a million digits")
async def values(target: Target) -> None:
    messages = b'{"model":"m","messages":[' + b",".join([b"0"] * 1_000_000) + b"]}"
    names = b"{" + b",".join(b'"a%d":1' % number for number in range(200_000)) + b"}"
    for content in (messages, names, b'{"seed":' + b"9" * 1_000_000 + b"}", b'{"temperature":1e999999999}'):
        await target.post(CHAT, times=4, content=content)


@attack("body-texts", "fields that are echoed or looked up, of a megabyte each")
async def texts(target: Target) -> None:
    long = "\N{GRINNING FACE}\x1b[31m" * 120_000
    for field in ("model", "user", "tool_choice", "prompt_cache_key", "service_tier", "metadata"):
        await target.chat(**{field: long})


@attack("body-slow", "200 bodies that arrive a byte a second, for 20 s")
async def slow(target: Target) -> None:
    async def drip() -> None:
        async def body() -> AsyncIterator[bytes]:
            for byte in json.dumps({"model": target.model})[:20]:
                yield byte.encode()
                await asyncio.sleep(1)

        async with target.client(target.key) as client:
            try:
                answer = await client.post(CHAT, content=body(), headers={"Content-Type": "application/json"})
                target.sent[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                target.sent[type(error).__name__] += 1

    await asyncio.gather(*(drip() for _ in range(200)))


@attack("body-large", "16 bodies of the largest size at once")
async def large(target: Target) -> None:
    await target.chat("a" * 3_900_000, times=16)
