"""Anthropic's SDK: tools and their results, whole and streamed; each object is held to the SDK's own types."""

import json
import os
import sys

from anthropic import Anthropic
from anthropic.types import Message

RESULTS = json.loads(os.environ["RESULTS"])
client = Anthropic(base_url=os.environ["GATEWAY_URL"], api_key="none", max_retries=0)


def tool(name: str, description: str, argument: str) -> dict:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"name": name, "description": description, "input_schema": schema}


TOOLS = [
    tool("track_order", "Find out where an order is.", "order"),
    tool("send_invoice", "Send the invoice of an order.", "order"),
]


def answer(question: str) -> dict:
    messages, calls = [{"role": "user", "content": question}], []
    while True:
        asked = {
            "model": os.environ["MODEL"], "max_tokens": 128, "messages": messages, "tools": TOOLS,
            "extra_body": {"temperature": 0},
        }  # fmt: skip
        message = client.messages.create(**asked)
        Message.model_validate(message.to_dict())
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        said = [block.text for block in message.content if block.type == "text"]
        used = [block for block in message.content if block.type == "tool_use"]
        assert [block.text for block in streamed.content if block.type == "text"] == said
        again = [block.input for block in streamed.content if block.type == "tool_use"]
        assert again == [block.input for block in used], again
        assert (message.stop_reason == "tool_use") == bool(used)
        if not used:
            return {"calls": calls, "answer": "".join(said)}
        calls += [[block.name, block.input] for block in used]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": json.dumps(next(RESULTS[block.name][value] for value in block.input.values())),
            }
            for block in used
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


print(json.dumps([answer(question) for question in sys.argv[1:]]))
