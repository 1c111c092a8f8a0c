"""A server for the tests of applications: real gRPC on loopback, answers from a script, no model and no GPU.

    from pipeline.client import Client
    from pipeline.client.testing import FakeServer, Reply

    def test_shows_the_answer() -> None:
        with FakeServer(Reply(["Hel", "lo"])) as server, Client(server.url) as client:
            assert client.generate("Hi", max_tokens=8).text == "Hello"
            assert server.requests[0].prompt == "Hi"

It speaks what a client of Triton needs: ModelStreamInfer (and ModelInfer) of the entry models, their configuration and
metadata, and the health calls. What Triton refuses at admission, such as an unknown tensor, it refuses in the same
words.
"""

from __future__ import annotations

from pipeline.client.testing.reply import Ending, Received, Reply
from pipeline.client.testing.server import FakeServer, bls, llmapi

__all__ = ["Ending", "FakeServer", "Received", "Reply", "bls", "llmapi"]
