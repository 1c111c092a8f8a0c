"""The APIs of the gateway, each a layer over the same generation.

    chat         /v1/chat/completions and /v1/completions
    responses    OpenAI's Responses API, and what is stored of responses
    messages     Anthropic's Messages API
    batches      files, batches and message batches
    embeddings, models, tokenization

A request goes through `model_answer` (the way that all share), `parsing` and `schema`, `prompts` and `tools`, and
`generation` with its `choice`s; its answer goes back through its API's module and `sse`.
"""
