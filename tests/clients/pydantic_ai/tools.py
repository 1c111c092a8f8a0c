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
def send_invoice(order: str) -> dict:
    """Send the invoice of an order."""
    calls.append(["send_invoice", {"order": order}])
    return RESULTS["send_invoice"][order]


async def answer(question: str) -> dict:
    calls.clear()
    whole = (await agent.run(question)).output
    first = list(calls)
    calls.clear()
    async with agent.run_stream(question) as stream:
        streamed = await stream.get_output()
    # Tools that are called at once run side by side.
    assert (streamed, sorted(calls, key=str)) == (whole, sorted(first, key=str)), (streamed, calls)
    return {"calls": first, "answer": whole}


async def main() -> None:
    print(json.dumps([await answer(question) for question in sys.argv[1:]]))


asyncio.run(main())
