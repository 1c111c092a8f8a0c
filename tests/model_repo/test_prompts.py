"""Prompts as tensors: as TensorRT-LLM's preprocessing makes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from shared.parameters import Parameters
from shared.prompts import PromptEncoder, pad_right
from shared.refusal import RequestRefused
from shared.stop_words import unpack
from shared.tokenizer import TextTokenizer

from tests.support import nasty_tokenizers

BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    nasty_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return PromptEncoder(TextTokenizer(folder), end_id=EOS, pad_id=7, stop_token_ids=(9,), vocab_size=400)


def test_rows_are_padded_on_the_right(encoder: PromptEncoder) -> None:
    prompts = encoder.encode(["words", "a"])
    lengths = prompts.input_lengths.reshape(-1).tolist()
    assert prompts.input_ids.shape == (2, max(lengths))
    assert prompts.input_ids[1, lengths[1] :].tolist() == [7] * (lengths[0] - lengths[1])
    assert prompts.input_ids[:, 0].tolist() == [BOS, BOS]
    assert (prompts.end_id.tolist(), prompts.pad_id.tolist()) == ([[EOS], [EOS]], [[7], [7]])


def test_bos_is_not_doubled(encoder: PromptEncoder) -> None:
    plain = encoder.encode(["words"]).input_ids[0].tolist()
    assert encoder.encode(["<s>words"]).input_ids[0].tolist() == plain
    assert encoder.encode(["<s><s>words"]).input_ids[0].tolist() == [
        BOS,
        *plain,
    ]  # one was asked for in the text


def test_without_words_the_tensors_are_empty(encoder: PromptEncoder) -> None:
    prompts = encoder.encode(["a"], end_id=np.array([[3]], np.int32))
    assert prompts.stop_words.shape == prompts.bad_words.shape == (1, 2, 0)
    assert prompts.embedding_bias.shape == (1, 0)
    assert prompts.table_ids is None


def test_further_end_tokens_are_stop_words_unless_a_request_has_its_own_end(encoder: PromptEncoder) -> None:
    words = encoder.tokenizer.encode_word("more")
    assert unpack(encoder.encode(["a"], stop_words=[["more"]]).stop_words[0]) == (tuple(words), (9,))
    own = encoder.encode(["a"], stop_words=[["more"]], end_id=np.array([[3]], np.int32))
    assert unpack(own.stop_words[0]) == (tuple(words),)
    assert own.end_id.tolist() == [[3]]


def test_biased_words(encoder: PromptEncoder) -> None:
    prompts = encoder.encode(
        ["a"], bias_words=[["then", "then"]], bias_weights=np.array([[1.5, 2.0]], np.float32)
    )
    ids = encoder.tokenizer.encode_word("then")
    assert prompts.embedding_bias.shape == (1, 400)
    assert prompts.embedding_bias[0, ids].tolist() == [3.5] * len(ids)
    assert np.count_nonzero(prompts.embedding_bias) == len(set(ids))
    with pytest.raises(RequestRefused, match="embedding bias: 1 words, 2 weights"):
        encoder.encode(["a"], bias_words=[["then"]], bias_weights=np.array([[1.0, 2.0]], np.float32))


def test_rows_of_a_prompt_table_are_tokens_beyond_the_vocabulary(encoder: PromptEncoder) -> None:
    small = PromptEncoder(encoder.tokenizer, end_id=EOS, pad_id=0, stop_token_ids=(), vocab_size=50)
    prompts = small.encode(["words"], table_id=np.array([[77]], np.uint64))
    assert prompts.table_ids is not None
    assert prompts.table_ids.tolist() == np.where(prompts.input_ids >= 50, 77, 0).tolist()


def test_padding_of_nothing() -> None:
    assert pad_right([[], [1]], np.array([[5], [6]], np.int32)).tolist() == [[5], [1]]


def parameters(tmp_path: Path, **values: str) -> Parameters:
    declared = {name: {"string_value": value} for name, value in values.items()}
    return Parameters(
        {
            "model_config": json.dumps({"parameters": declared}),
            "model_repository": str(tmp_path / "echo"),
            "model_name": "echo",
        }
    )


def test_parameters_are_typed(tmp_path: Path) -> None:
    given = parameters(tmp_path, n="5", many="1,2", none="", yes="True", no="0", folder="1/tokenizer")
    assert (given.number("n"), given.number("m", 3), given.numbers("many"), given.numbers("none")) == (
        5,
        3,
        (1, 2),
        (),
    )
    assert (given.flag("yes"), given.flag("no"), given.flag("absent", True)) == (True, False, True)
    assert given.path("folder") == tmp_path / "echo" / "1" / "tokenizer"
    assert given.path("folder", "x").is_absolute()
    assert (given.has("n"), given.has("m")) == (True, False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("number", "n = five: must be a whole number"), ("flag", "n = five: must be true or false"),
     ("numbers", "n = five: must be whole numbers between commas")],
)  # fmt: skip
def test_parameters_that_are_wrong_are_named(tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"echo/config.pbtxt: parameter {message}"):
        getattr(parameters(tmp_path, n="five"), kind)("n")
    with pytest.raises(ValueError, match="parameter gone is missing"):
        parameters(tmp_path).text("gone")


@pytest.mark.parametrize("name", ["stop_words", "bad_words", "bias_words"])
def test_words_that_would_take_seconds_are_refused_by_name(encoder: PromptEncoder, name: str) -> None:
    with pytest.raises(RequestRefused, match=r"has 3200000 characters in all, of at most 16384$") as caught:
        encoder.encode(["Hello"], **{name: [["a" * 50_000] * 64]})
    assert name.removeprefix("bias_") in str(caught.value)
