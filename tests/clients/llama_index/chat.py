"""LlamaIndex."""

import json
import os
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=os.environ["MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    is_chat_model=True,
    temperature=0,
    max_retries=0,
)
messages = [ChatMessage(role="user", content=sys.argv[1])]
plain = model.chat(messages)
streamed = [chunk.delta for chunk in model.stream_chat(messages) if chunk.delta]
print(json.dumps({"plain": plain.message.content, "streamed": streamed}))
