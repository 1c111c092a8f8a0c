"""openai, the SDK for Python: tools, with the arguments of calls streamed."""

import json
import os
import sys

from openai import OpenAI

RESULTS = json.loads(os.environ["RESULTS"])


def described(name: str, text: str, argument: str) -> dict:
    properties = {argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


client = OpenAI()
tools = [
    described("track_order", "Find out where an order is.", "order"),
    described("send_invoice", "Send the invoice of an order.", "order"),
]


def answer(question: str) -> dict:
    messages, calls = [{"role": "user", "content": question}], []
    while True:
        with client.chat.completions.stream(
            model=os.environ["MODEL"], messages=messages, tools=tools, temperature=0
        ) as stream:
            deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            message = stream.get_final_completion().choices[0].message
        messages.append(message.to_dict())
        for call in message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            (argument,) = arguments.values()
            calls.append([call.function.name, arguments])
            result = json.dumps(RESULTS[call.function.name][argument])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return {"calls": calls, "answer": message.content}
        assert len(deltas) > len(message.tool_calls), "arguments come in pieces"


print(json.dumps([answer(question) for question in sys.argv[1:]]))
