"""Pieces of text join to the decoding of all tokens, whatever the tokenizer tears apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.tokenizer import TextDecoder
from tokenizers import Tokenizer

from tests.support import nasty_tokenizers

DECODERS = {kind: TextDecoder(make()) for kind, make in nasty_tokenizers.KINDS.items()}
TOKENIZERS: dict[str, Tokenizer] = {kind: make() for kind, make in nasty_tokenizers.KINDS.items()}
kinds = pytest.mark.parametrize("kind", DECODERS)


def pieces(decoder: TextDecoder, chunks: list[list[int]]) -> list[str]:
    stream = decoder.stream()
    return [*(stream.push(chunk) for chunk in chunks), stream.finish()]


@kinds
def test_one_token_at_a_time(kind: str) -> None:
    for text in nasty_tokenizers.TEXTS:
        ids = TOKENIZERS[kind].encode(text).ids
        assert "".join(pieces(DECODERS[kind], [[id] for id in ids])) == DECODERS[kind].decode(ids), text


@kinds
@given(data=st.data())
def test_any_tokens_in_any_chunks(kind: str, data: st.DataObject) -> None:
    size = TOKENIZERS[kind].get_vocab_size()
    chunks = data.draw(st.lists(st.lists(st.integers(0, size + 3), max_size=5), max_size=12))
    parts = pieces(DECODERS[kind], chunks)
    assert "".join(parts) == DECODERS[kind].decode([id for chunk in chunks for id in chunk])


@kinds
@settings(max_examples=30)
@given(text=st.text(max_size=40))
def test_any_text(kind: str, text: str) -> None:
    ids = TOKENIZERS[kind].encode(text).ids
    assert "".join(pieces(DECODERS[kind], [[id] for id in ids])) == DECODERS[kind].decode(ids)


def test_a_character_comes_whole() -> None:
    ids = TOKENIZERS["byte_level"].encode("😀", add_special_tokens=False).ids
    assert len(ids) > 1
    assert [piece for piece in pieces(DECODERS["byte_level"], [[id] for id in ids]) if piece] == ["😀"]


def test_a_run_of_byte_tokens_comes_when_it_ends() -> None:
    ids = TOKENIZERS["byte_fallback"].encode("a€b", add_special_tokens=False).ids
    assert [piece for piece in pieces(DECODERS["byte_fallback"], [[id] for id in ids]) if piece] == [
        "a",
        "€b",
    ]


def test_words_are_not_delayed() -> None:
    ids = TOKENIZERS["byte_fallback"].encode("plain words", add_special_tokens=False).ids
    assert pieces(DECODERS["byte_fallback"], [[id] for id in ids]) == [
        "",
        *"plain words",
        "",
    ]  # the first is ▁


def test_special_tokens_are_left_out_or_kept() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [tokenizer.token_to_id("<s>"), *tokenizer.encode("hi", add_special_tokens=False).ids]
    assert "".join(pieces(DECODERS["byte_level"], [ids])) == "hi"
    assert "".join(pieces(TextDecoder(tokenizer, skip_special_tokens=False), [ids])) == "<s>hi"


def test_a_long_answer_keeps_a_short_window() -> None:
    stream = DECODERS["byte_level"].stream()
    for id in TOKENIZERS["byte_level"].encode("plain words, 안녕 " * 200).ids:
        stream.push([id])
        assert len(stream._window) < 12
