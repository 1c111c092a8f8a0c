"""LlamaIndex: chat_with_tools."""

import json
import os
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

RESULTS = json.loads(os.environ["RESULTS"])


def track_order(order: str) -> str:
    """Find out where an order is."""
    return json.dumps(RESULTS["track_order"][order])


def send_invoice(order: str) -> str:
    """Send the invoice of an order."""
    return json.dumps(RESULTS["send_invoice"][order])


tools = {tool.metadata.name: tool for tool in map(FunctionTool.from_defaults, (track_order, send_invoice))}
model = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_retries=0,
)


def answer(question: str) -> dict:
    messages, calls = [ChatMessage(role="user", content=question)], []
    while True:
        response = model.chat_with_tools(
            list(tools.values()), chat_history=messages, allow_parallel_tool_calls=True
        )
        messages.append(response.message)
        selected = model.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        for call in selected:
            calls.append([call.tool_name, call.tool_kwargs])
            result = tools[call.tool_name](**call.tool_kwargs)
            known = {"tool_call_id": call.tool_id}
            messages.append(ChatMessage(role="tool", content=str(result), additional_kwargs=known))
        if not selected:
            return {"calls": calls, "answer": response.message.content}


print(json.dumps([answer(question) for question in sys.argv[1:]]))
