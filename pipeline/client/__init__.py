"""Streaming client for language models on NVIDIA Triton, blocking and asyncio, over gRPC.

    from pipeline.client import Client

    with Client("localhost:8001") as client, client.stream("Once upon a time", max_tokens=64) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)

Needs grpcio, tritonclient, numpy and jinja2, and nothing of the side that builds models. `pipeline.client.testing` has
a server for the tests of applications.
"""

from __future__ import annotations

from pipeline.client.aio import AsyncClient, AsyncStream
from pipeline.client.answer import (
    Answer,
    Cached,
    Chunk,
    FinishReason,
    PartialAnswer,
    PromptLogProbs,
    Stats,
    TopLogProbs,
)
from pipeline.client.base import request_headers
from pipeline.client.errors import (
    BetweenTokensDeadline,
    Busy,
    Cancelled,
    ClientError,
    ConnectFailed,
    DeadlineExceeded,
    FirstTokenDeadline,
    ModelNotFound,
    PromptTooLong,
    Refused,
    ServerFailed,
    ServerLost,
)
from pipeline.client.prompt import Conversation, Prompt, PromptLimit
from pipeline.client.sampling import RequestOptions, Sampling
from pipeline.client.settings import KeepAlive, Retries, Timeouts
from pipeline.client.sync import Client, Stream
from pipeline.models.chat_template import ChatTemplate, Message, TemplateError

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "BetweenTokensDeadline",
    "Busy",
    "Cached",
    "Cancelled",
    "ChatTemplate",
    "Chunk",
    "Client",
    "ClientError",
    "ConnectFailed",
    "Conversation",
    "DeadlineExceeded",
    "FinishReason",
    "FirstTokenDeadline",
    "KeepAlive",
    "Message",
    "ModelNotFound",
    "PartialAnswer",
    "Prompt",
    "PromptLimit",
    "PromptLogProbs",
    "PromptTooLong",
    "Refused",
    "RequestOptions",
    "Retries",
    "Sampling",
    "ServerFailed",
    "ServerLost",
    "Stats",
    "Stream",
    "TemplateError",
    "Timeouts",
    "TopLogProbs",
    "request_headers",
]
