"""Anthropic's SDK: one answer, whole and streamed."""

import json
import os
import sys

from anthropic import Anthropic

client = Anthropic(base_url=os.environ["GATEWAY_URL"], api_key="none", max_retries=0)
asked = {
    "model": os.environ["MODEL"],
    "max_tokens": 64,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": sys.argv[1]}],
}
whole = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    streamed = list(stream.text_stream)
    final = stream.get_final_message()
assert final.content[0].text == whole.content[0].text
assert final.usage.output_tokens == whole.usage.output_tokens
counted = client.messages.count_tokens(model=asked["model"], messages=asked["messages"])
assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
print(json.dumps({"plain": whole.content[0].text, "streamed": streamed}))
