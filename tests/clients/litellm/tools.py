"""LiteLLM, as a library: tools, whole and streamed."""

import json
import os
import sys

# Else it asks the network for prices as it is imported, and its import fails now and then where there is none.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

RESULTS = json.loads(os.environ["RESULTS"])


def described(name: str, text: str, argument: str) -> dict:
    properties = {argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


tools = [
    described("track_order", "Find out where an order is.", "order"),
    described("send_invoice", "Send the invoice of an order.", "order"),
]


def answer(question: str) -> dict:
    messages, calls = [{"role": "user", "content": question}], []
    while True:
        ask = {
            "model": f"openai/{os.environ['MODEL']}",
            "messages": messages,
            "tools": tools,
            "tool_choice": "auto",
            "temperature": 0,
            "num_retries": 0,
        }
        message = litellm.completion(**ask).choices[0].message
        chunks = list(litellm.completion(**ask, stream=True))
        streamed = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
        assert called(streamed) == called(message), streamed
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            (argument,) = json.loads(call.function.arguments).values()
            result = json.dumps(RESULTS[call.function.name][argument])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        calls += called(message)
        if not message.tool_calls:
            return {"calls": calls, "answer": message.content}


def called(message) -> list:
    return [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or ()]


print(json.dumps([answer(question) for question in sys.argv[1:]]))
