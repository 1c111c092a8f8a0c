"""An OpenAI-compatible server without a model, which knows what it did: for tools that measure servers.

    python benchmarks/stand_in.py FIRST_MS GAP_MS        prints its port; ends with its standard input

Each answer has `max_tokens` tokens, one a chunk. When they are due depends on the prompt alone: the first after about
FIRST_MS, the others about GAP_MS apart, so that the same prompts take the same times whoever asks. Times are deadlines
from the request's arrival, so that no lateness adds up. `GET /told` gives what really happened since the last time, by
this process's clock: for each answer its TTFT, its total and its gaps in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from itertools import accumulate, pairwise
from typing import Any

from aiohttp import web

SPREAD = 0.25  # standard deviation of the logarithm of the first delay
TOLD: list[dict[str, Any]] = []
DELAYS = web.AppKey("delays", tuple[float, float])


def deadlines(prompt: str, first_s: float, gap_s: float, tokens: int) -> list[float]:
    """When each token of the answer to a prompt is due, in seconds since the request came."""
    chance = random.Random(prompt)
    pace = chance.uniform(0.7, 1.3) * gap_s
    gaps = (chance.uniform(0.5, 1.5) * pace for _ in range(tokens - 1))
    return list(accumulate(gaps, initial=first_s * chance.lognormvariate(0.0, SPREAD)))


def event(fields: dict[str, Any]) -> bytes:
    """One server-sent event of a chat completion."""
    head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "stand-in"}
    return b"data: " + json.dumps(head | fields).encode() + b"\n\n"


def delta(content: dict[str, Any], reason: str | None = None) -> bytes:
    """The event of one part of an answer."""
    return event({"choices": [{"index": 0, "delta": content, "finish_reason": reason}]})


async def answer(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions, streamed."""
    came = time.perf_counter()
    asked = await request.json()
    first_s, gap_s = request.app[DELAYS]
    due = deadlines(asked["messages"][-1]["content"], first_s, gap_s, asked["max_tokens"])
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(delta({"role": "assistant", "content": ""}))
    sent = []
    for number, at_s in enumerate(due):
        await asyncio.sleep(max(0.0, came + at_s - time.perf_counter()))
        sent.append(time.perf_counter())
        await response.write(delta({"content": f"token{number} "}))
    await response.write(delta({}, "length"))
    tokens = {"prompt_tokens": 8, "completion_tokens": len(due), "total_tokens": 8 + len(due)}
    await response.write(event({"choices": [], "usage": tokens}) + b"data: [DONE]\n\n")
    gaps = [(later - earlier) * 1e3 for earlier, later in pairwise(sent)]
    TOLD.append({"ttft": (sent[0] - came) * 1e3, "total": (sent[-1] - came) * 1e3, "itl": gaps})
    return response


async def told(_: web.Request) -> web.Response:
    """GET /told."""
    seen = web.json_response(TOLD)
    TOLD.clear()
    return seen


async def models(_: web.Request) -> web.Response:
    """GET /v1/models."""
    return web.json_response({"object": "list", "data": [{"id": "stand-in", "object": "model"}]})


async def serve(first_ms: float, gap_ms: float) -> None:
    """Serve until the standard input ends."""
    app = web.Application()
    app[DELAYS] = (first_ms / 1e3, gap_ms / 1e3)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/told", told)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), float(sys.argv[2])))
