"""OpenAI's Responses API as a layer over chats: its `endpoints`, the `request`, the `answer`, and `stored` responses.

Written against openai-python 3.54 (`openai.types.responses`). A request becomes a `ChatRequest` and a list of messages,
so that checks, limits, queue, cache, tools and metrics are those of chats.
"""
