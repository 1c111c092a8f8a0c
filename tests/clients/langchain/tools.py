"""LangChain: bind_tools, whole and streamed."""

import json
import os
import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

RESULTS = json.loads(os.environ["RESULTS"])


@tool
def track_order(order: str) -> dict:
    """Find out where an order is."""
    return RESULTS["track_order"][order]


@tool
def send_invoice(order: str) -> dict:
    """Send the invoice of an order."""
    return RESULTS["send_invoice"][order]


tools = {tool.name: tool for tool in (track_order, send_invoice)}
model = ChatOpenAI(model=os.environ["MODEL"], temperature=0, max_retries=0)
bound = model.bind_tools(list(tools.values()))


def called(message) -> list:
    return [[call["name"], call["args"]] for call in message.tool_calls]


def answer(question: str) -> dict:
    messages, calls = [HumanMessage(question)], []
    while True:
        message = bound.invoke(messages)
        chunks = list(bound.stream(messages))
        streamed = sum(chunks[1:], chunks[0])
        assert (called(streamed), streamed.content) == (called(message), message.content), streamed
        messages.append(message)
        calls += called(message)
        messages += [tools[call["name"]].invoke(call) for call in message.tool_calls]
        if not message.tool_calls:
            return {"calls": calls, "answer": message.content}


for choice in ("any", "track_order"):
    for several in (True, False):
        forced = model.bind_tools(list(tools.values()), tool_choice=choice, parallel_tool_calls=several)
        assert called(forced.invoke(sys.argv[1]))[0][0] == "track_order"
print(json.dumps([answer(question) for question in sys.argv[1:]]))
