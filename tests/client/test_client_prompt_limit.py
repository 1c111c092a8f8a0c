"""A prompt that is longer than the engine takes never leaves the client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from pipeline.client import ChatTemplate, Client, PromptLimit, PromptTooLong, Refused
from pipeline.client.prompt import max_chars_per_token
from pipeline.client.testing import FakeServer
from tests.support import nasty_tokenizers

MESSAGES = [{"role": "user", "content": "a b c"}]


class Words:
    """Counts a token a word."""

    def encode_batch_fast(self, texts: Sequence[str], /) -> list[list[str]]:
        return [text.split() for text in texts]


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


@pytest.mark.parametrize("content", [None, "no JSON", "{}", json.dumps({"tokenizer_dir": "t", "limits": {}})])
def test_a_package_that_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "deployment.json").write_text(content, encoding="utf-8")
    with pytest.raises(Refused, match=r"deployment\.json: does not tell the limits"):
        PromptLimit.from_package(tmp_path)


def composing() -> Tokenizer:
    tokenizer = nasty_tokenizers.byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return tokenizer


MAKERS = {**nasty_tokenizers.KINDS, "composing": composing}
BOUNDED = {
    name: (made := make(), max_chars_per_token(json.loads(made.to_str())))
    for name, make in MAKERS.items()
    if name != "metaspace"
}


@given(st.sampled_from(list(BOUNDED)), st.text() | st.text("ωι\u0313\u0300\u0345 "))
def test_what_fits_is_never_refused_by_its_characters(name: str, text: str) -> None:
    tokenizer, most = BOUNDED[name]
    assert most is not None
    tokens = len(tokenizer.encode(text).ids)
    assert PromptLimit(tokenizer, max(tokens, 1), most).check(text) == tokens


def test_a_text_of_too_many_characters_is_refused_without_being_tokenized() -> None:
    class Nobody:
        def encode_batch_fast(self, texts: Sequence[str], /) -> list[list[str]]:
            raise AssertionError(f"{len(texts)} texts are tokenized")

    with pytest.raises(PromptTooLong, match="has at least 6 tokens, and this model takes at most 5"):
        PromptLimit(Nobody(), 5, 10).check("x" * 51)


def changed(**parts: Any) -> Tokenizer:
    tokenizer = nasty_tokenizers.byte_level()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def absorbing() -> Tokenizer:
    tokenizer = nasty_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken("<end>", rstrip=True)])
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
UNBOUNDED = {
    "unknown words are one token": lambda: Tokenizer(
        models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    ),
    "white space is stripped": lambda: changed(normalizer=normalizers.Strip()),
    "white space is dropped": lambda: changed(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES])
    ),
    "white space goes with a token": absorbing,
    "some bytes have no token": lambda: changed(model=models.BPE(vocab={"a": 0}, merges=[])),
    "metaspace": nasty_tokenizers.metaspace,
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_a_token_can_stand_for_any_number_of_characters(kind: str) -> None:
    assert max_chars_per_token(json.loads(UNBOUNDED[kind]().to_str())) is None
