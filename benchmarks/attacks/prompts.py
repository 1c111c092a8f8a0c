"""Attacks by what is tokenized: prompts, stop words, bad words, biases, messages and tools of a chat template."""

from __future__ import annotations

import asyncio

from benchmarks.attacks import Target, attack


@attack(
    "prompt-long", "texts of 2 MB: one word, emoji, spaces, accents, special tokens; four of each at once"
)
async def long(target: Target) -> None:
    for piece in ("a", "\N{FACE WITH TEARS OF JOY}", " ", "e\u0301\u0323", "<|im_start|>", "\ufdfa"):
        await target.complete(prompt=piece * (2_000_000 // len(piece.encode())), times=4)
        await target.chat(piece * (2_000_000 // len(piece.encode())), times=4)


@attack("prompt-many", "a thousand prompts in one request, and token ids by the hundred thousand")
async def many(target: Target) -> None:
    await target.complete(prompt=["Hello " * 50] * 1000)
    await target.complete(prompt=list(range(3, 300)) * 500)
    await target.complete(prompt=[[5, 6, 7]] * 1000)


@attack("words-stop", "64 stop words of 50,000 characters, and as many bad words")
async def stop(target: Target) -> None:
    words = [chr(97 + number % 26) * 50_000 for number in range(64)]
    await target.complete(stop=words, times=4)
    await target.complete(bad_words=words, times=4)
    await target.complete(stop=words[:4], times=4)


@attack("words-bias", "a bias for each token of a large vocabulary")
async def bias(target: Target) -> None:
    await target.complete(logit_bias={str(number): 1 for number in range(40_000)}, times=8)


@attack("messages-many", "12,000 messages, and a message of 16,000 parts")
async def messages(target: Target) -> None:
    turns = [{"role": ("user", "assistant")[number % 2], "content": "a"} for number in range(12_000)]
    await target.chat(messages=turns, times=4)
    parts = [{"type": "text", "text": "a"} for _ in range(16_000)]
    await target.chat(messages=[{"role": "user", "content": parts}], times=4)


@attack("tools-many", "128 tools of large schemas, and one schema of 12,000 properties")
async def tools(target: Target) -> None:
    def tool(name: str, properties: int) -> dict[str, object]:
        fields = {
            f"field_{number}": {"type": "string", "description": "x" * 20} for number in range(properties)
        }
        return {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": fields}},
        }

    await target.chat(
        tools=[tool(f"tool_{number}", 60) for number in range(128)], tool_choice="required", times=2
    )
    await target.chat(tools=[tool("wide", 12_000)], tool_choice="required", times=2)


@attack(
    "tools-dear",
    "schemas of 60 KB that take seconds to validate, each another one, as forms and as tools",
    limit_s=300.0,
)
async def dear(target: Target) -> None:
    async def ask(number: int) -> None:
        schema = {"title": str(number), "anyOf": [{"not": {}} for _ in range(4_500)]}
        form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
        tool = {"type": "function", "function": {"name": "dear", "parameters": schema}}
        await target.chat(response_format=form)
        await target.chat(tools=[tool], tool_choice="required")

    await asyncio.gather(*(ask(number) for number in range(16)))
