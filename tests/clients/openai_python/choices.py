"""openai, the SDK for Python: every kind of `tool_choice`, and `parallel_tool_calls`, whole and streamed.

Prints {kind: [[name, arguments] of each call], …} for the question that is its argument.
"""

import json
import os
import sys

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

client = OpenAI()


class TrackOrder(BaseModel):
    """Find out where an order is."""

    order: str = Field(description="The number of the order.")


class SendInvoice(BaseModel):
    """Send the invoice of an order."""

    order: str = Field(description="The number of the order.")


tools = [
    pydantic_function_tool(TrackOrder, name="track_order"),
    pydantic_function_tool(SendInvoice, name="send_invoice"),
]


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(map(named, names))}}


KINDS = {
    "default": {},
    "auto": {"tool_choice": "auto"},
    "none": {"tool_choice": "none"},
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": named("track_order")},
    "allowed": {"tool_choice": allowed("auto", "track_order")},
    "others allowed": {"tool_choice": allowed("auto", "send_invoice")},
    "allowed and required": {"tool_choice": allowed("required", "track_order")},
    "several": {"parallel_tool_calls": True},
    "one": {"parallel_tool_calls": False},
    "several required": {"tool_choice": "required", "parallel_tool_calls": True},
    "one required": {"tool_choice": "required", "parallel_tool_calls": False},
}


def calls(fields: dict) -> list:
    ask = {
        "model": os.environ["MODEL"],
        "messages": [{"role": "user", "content": sys.argv[1]}],
        "tools": tools,
        "temperature": 0,
        **fields,
    }
    whole = client.chat.completions.create(**ask).choices[0]
    with client.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0]
    read = [
        [
            [call.function.name, json.loads(call.function.arguments)]
            for call in answer.message.tool_calls or ()
        ]
        for answer in (whole, streamed)
    ]
    assert read[0] == read[1], read
    assert whole.finish_reason == streamed.finish_reason == ("tool_calls" if read[0] else "stop")
    assert bool(whole.message.content) != bool(read[0])
    return read[0]


print(json.dumps({kind: calls(fields) for kind, fields in KINDS.items()}))
