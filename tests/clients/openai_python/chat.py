"""openai, the SDK for Python."""

import json
import os
import sys

from openai import OpenAI

client = OpenAI()
ask = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": sys.argv[1]}],
    "temperature": 0,
}
plain = client.chat.completions.create(**ask)
streamed = [
    chunk.choices[0].delta.content
    for chunk in client.chat.completions.create(**ask, stream=True)
    if chunk.choices and chunk.choices[0].delta.content
]
print(json.dumps({"plain": plain.choices[0].message.content, "streamed": streamed}))
