"""A prompt that is longer than the engine takes never leaves the client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client import AsyncClient, ChatTemplate, Client, PromptLimit, PromptTooLong, Refused
from pipeline.client.testing import FakeServer

MESSAGES = [{"role": "user", "content": "a b c"}]


class Words:
    """Counts a token a word."""

    class Encoding:
        def __init__(self, text: str) -> None:
            self.ids = text.split()

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Encoding:  # noqa: ARG002
        return self.Encoding(text)


@given(st.integers(1, 30), st.integers(1, 30))
def test_exactly_what_the_engine_takes(tokens: int, most: int) -> None:
    limit = PromptLimit(Words(), most)
    if tokens <= most:
        assert limit.check("word " * tokens) == tokens
    else:
        with pytest.raises(PromptTooLong, match=f"has {tokens} tokens, and this model takes at most {most}"):
            limit.check("word " * tokens)


def test_messages_count_as_the_template_writes_them() -> None:
    template = ChatTemplate("<user> {{ messages[0].content }} <assistant>")
    with FakeServer() as server:
        for most, fits in ((5, True), (4, False)):
            with Client(server.url, template=template, prompt_limit=PromptLimit(Words(), most)) as client:
                if fits:
                    client.generate(MESSAGES, max_tokens=4)
                else:
                    with pytest.raises(PromptTooLong) as caught:
                        client.generate(MESSAGES, max_tokens=4)
                    assert (caught.value.tokens, caught.value.most) == (5, 4)
        assert len(server.requests) == 1


def test_by_asyncio_too() -> None:
    async def ask(url: str) -> None:
        async with AsyncClient(url, prompt_limit=PromptLimit(Words(), 2)) as client:
            with pytest.raises(PromptTooLong):
                await client.generate("a b c", max_tokens=4)

    with FakeServer() as server:
        asyncio.run(ask(server.url))
        assert server.requests == []


@pytest.mark.parametrize("content", [None, "no JSON", "{}", json.dumps({"tokenizer_dir": "t", "limits": {}})])
def test_a_package_that_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "deployment.json").write_text(content, encoding="utf-8")
    with pytest.raises(Refused, match=r"deployment\.json: does not tell the limits"):
        PromptLimit.from_package(tmp_path)
