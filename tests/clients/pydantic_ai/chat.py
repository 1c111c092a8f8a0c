"""pydantic-ai."""

import asyncio
import json
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(os.environ["MODEL"]), model_settings={"temperature": 0})


async def main() -> None:
    plain = await agent.run(sys.argv[1])
    async with agent.run_stream(sys.argv[1]) as answer:
        streamed = [text async for text in answer.stream_text(delta=True, debounce_by=None) if text]
    print(json.dumps({"plain": plain.output, "streamed": streamed}))


asyncio.run(main())
