"""OpenAI Agents SDK: an agent with tools, which the Responses API answers, whole and streamed."""

import asyncio
import json
import os
import sys

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.items import ToolCallItem

RESULTS = json.loads(os.environ["RESULTS"])
set_tracing_disabled(True)


@function_tool
def track_order(order: str) -> str:
    """Find out where an order is."""
    return json.dumps(RESULTS["track_order"][order])


@function_tool
def send_invoice(order: str) -> str:
    """Send the invoice of an order."""
    return json.dumps(RESULTS["send_invoice"][order])


agent = Agent(
    name="Support",
    model=os.environ["MODEL"],
    model_settings=ModelSettings(temperature=0),
    tools=[track_order, send_invoice],
)


def called(items) -> list:
    calls = [item.raw_item for item in items if isinstance(item, ToolCallItem)]
    return [[call.name, json.loads(call.arguments)] for call in calls]


async def answer(question: str) -> dict:
    whole = await Runner.run(agent, question)
    streamed = Runner.run_streamed(agent, question)
    async for _ in streamed.stream_events():
        pass
    assert called(streamed.new_items) == called(whole.new_items), streamed.new_items
    assert streamed.final_output == whole.final_output
    return {"calls": called(whole.new_items), "answer": whole.final_output}


async def main() -> None:
    print(json.dumps([await answer(question) for question in sys.argv[1:]]))


asyncio.run(main())
