"""LiteLLM, as a library."""

import json
import os
import sys

# Else it asks the network for prices as it is imported, and its import fails now and then where there is none.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

ask = {
    "model": f"openai/{os.environ['MODEL']}",
    "messages": [{"role": "user", "content": sys.argv[1]}],
    "temperature": 0,
    "num_retries": 0,
}
plain = litellm.completion(**ask)
streamed = [
    chunk.choices[0].delta.content
    for chunk in litellm.completion(**ask, stream=True)
    if chunk.choices[0].delta.content
]
print(json.dumps({"plain": plain.choices[0].message.content, "streamed": streamed}))
