"""Anthropic's SDK: an answer that thinks, speaks and uses a tool, streamed, and sent back with the tool's result."""

import json
import os

from anthropic import Anthropic

client = Anthropic(base_url=os.environ["GATEWAY_URL"], api_key="none", max_retries=0)
schema = {"type": "object", "properties": {"id": {"type": "integer"}, "note": {"type": "string"}}}
question = {"role": "user", "content": "Where is 7?"}
asked = {"model": os.environ["MODEL"], "max_tokens": 64, "tools": [{"name": "track", "input_schema": schema}]}
with client.messages.stream(**asked, messages=[question]) as stream:
    thinking = "".join(event.thinking for event in stream if event.type == "thinking")
    message = stream.get_final_message()
result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "There."}
answer = {"role": "assistant", "content": message.content}
client.messages.create(**asked, messages=[question, answer, {"role": "user", "content": [result]}])
kinds = [block.type for block in message.content]
signed = [bool(block.signature) for block in message.content if block.type == "thinking"]
print(
    json.dumps({"kinds": kinds, "thinking": thinking, "signed": signed, "input": message.content[-1].input})
)
