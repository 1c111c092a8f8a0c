"""pydantic-ai: an agent with tools."""

import asyncio
import json
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

RESULTS = json.loads(os.environ["RESULTS"])
agent = Agent(OpenAIChatModel(os.environ["MODEL"]), model_settings={"temperature": 0})
calls = []


@agent.tool_plain
def track_order(order: str) -> dict:
    """Find out where an order is."""
    calls.append(["track_order", {"order": order}])
    return RESULTS["track_order"][order]


@agent.tool_plain
def book_technician(date: str) -> dict:
    """Book a visit of a technician."""
    calls.append(["book_technician", {"date": date}])
    return RESULTS["book_technician"][date]


async def answer(question: str) -> dict:
    calls.clear()
    whole = (await agent.run(question)).output
    first = list(calls)
    calls.clear()
    async with agent.run_stream(question) as stream:
        streamed = await stream.get_output()
    assert (streamed, calls) == (whole, first), (streamed, calls)
    return {"calls": first, "answer": whole}


async def main() -> None:
    print(json.dumps([await answer(question) for question in sys.argv[1:]]))


asyncio.run(main())
