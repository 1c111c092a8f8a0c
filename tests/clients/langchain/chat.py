"""LangChain."""

import json
import os
import sys

from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=os.environ["MODEL"], temperature=0, max_retries=0)
plain = model.invoke(sys.argv[1])
streamed = [chunk.content for chunk in model.stream(sys.argv[1]) if chunk.content]
print(json.dumps({"plain": plain.content, "streamed": streamed}))
