"""LangChain with the Responses API: whole, streamed, tools, a form, and turns that go on by id."""

import json
import os
import sys
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

RESULTS = json.loads(os.environ["RESULTS"])


@tool
def track_order(order: Literal["TP-174685", "TP-205873"]) -> dict:
    """Find out where an order is."""
    return RESULTS["track_order"][order]


class Order(BaseModel):
    order: Literal["TP-174685", "TP-205873"]


def model(**fields) -> ChatOpenAI:
    return ChatOpenAI(
        model=os.environ["MODEL"], temperature=0, max_retries=0, use_responses_api=True, **fields
    )


question, then = sys.argv[1:]
bound = model(use_previous_response_id=True).bind_tools([track_order])
calling = model(use_previous_response_id=True).bind_tools([track_order], tool_choice="track_order")
messages = [HumanMessage(question)]
called = calling.invoke(messages)
chunks = list(calling.stream(messages))
streamed = sum(chunks[1:], chunks[0])
messages += [called, *(track_order.invoke(call) for call in called.tool_calls)]
messages.append(bound.invoke(messages))
messages += [HumanMessage(then)]
last = bound.invoke(messages)
form = model().with_structured_output(Order, method="json_schema")
print(
    json.dumps(
        {
            "calls": [[call["name"], call["args"]] for call in called.tool_calls],
            "streamed calls": [[call["name"], call["args"]] for call in streamed.tool_calls],
            "answer": messages[-2].text,
            "then": last.text,
            "streamed": [chunk.text for chunk in model().stream(then) if chunk.text],
            "plain": model().invoke(then).text,
            "usage": last.usage_metadata["total_tokens"],
            "form": form.invoke(question).order,
        }
    )
)
