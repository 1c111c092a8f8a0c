"""Streaming client for language models on NVIDIA Triton: sync and async, over one connection.

    from pipeline.client import Client

    with Client("localhost:8001") as client, client.stream("Once upon a time", max_tokens=64) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)

Needs gRPC, tritonclient, numpy and jinja2; nothing of the side that builds models. `pipeline.client.testing` has
a server for tests of applications.
"""

from __future__ import annotations

from pipeline.client.aio import AsyncClient, AsyncStream
from pipeline.client.channel import KeepAlive
from pipeline.client.chunk import Answer, Chunk, FinishReason
from pipeline.client.conversation import Conversation
from pipeline.client.endpoints import Retries
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
)
from pipeline.client.prompt import PromptLimit
from pipeline.client.sampling import Sampling
from pipeline.client.stats import Cached, Stats, percentile
from pipeline.client.sync import Client, Stream
from pipeline.client.timeouts import Timeouts
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
    "PromptLimit",
    "PromptTooLong",
    "Refused",
    "Retries",
    "Sampling",
    "ServerFailed",
    "Stats",
    "Stream",
    "TemplateError",
    "Timeouts",
    "percentile",
]
