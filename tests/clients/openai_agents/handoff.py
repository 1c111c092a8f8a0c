"""OpenAI Agents SDK: an agent hands over to another, which calls a tool, streamed; the next turn goes on by id."""

import asyncio
import json
import os
import sys
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, handoff, set_tracing_disabled
from agents.extensions.handoff_filters import remove_all_tools

RESULTS = json.loads(os.environ["RESULTS"])
MODEL = os.environ["MODEL"]
set_tracing_disabled(True)


@function_tool
def track_order(order: Literal["TP-174685"]) -> str:
    """Find out where an order is."""
    return json.dumps(RESULTS["track_order"][order])


support = Agent(
    name="Support",
    model=MODEL,
    # The SDK lets the model choose again once a tool was called.
    model_settings=ModelSettings(temperature=0, tool_choice="required"),
    tools=[track_order],
)
triage = Agent(
    name="Triage",
    model=MODEL,
    model_settings=ModelSettings(temperature=0, tool_choice="transfer_to_support"),
    handoffs=[handoff(support, input_filter=remove_all_tools)],
)


async def main() -> None:
    run = Runner.run_streamed(triage, sys.argv[1])
    events, names, text = [], [], ""
    async for event in run.stream_events():
        if event.type == "raw_response_event":
            events.append(event.data.type)
            if event.data.type == "response.output_text.delta":
                text += event.data.delta
        elif event.type == "run_item_stream_event":
            names.append(event.name)
    plain = support.clone(tools=[], model_settings=ModelSettings(temperature=0))
    then = await Runner.run(plain, sys.argv[2], previous_response_id=run.last_response_id)
    said = {
        "agent": run.last_agent.name, "names": names, "events": events, "streamed": text,
        "answer": run.final_output, "then": then.final_output,
    }  # fmt: skip
    print(json.dumps(said))


asyncio.run(main())
