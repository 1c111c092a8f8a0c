"""The text of one answer: pieces, stop words, and the prompt when the engine repeats it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shared.tokenizer import TextDecoder

from tests.support import nasty_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "model_repo" / "tensorrt_llm_bls" / "1"))
from serving import AnswerText

TOKENIZER = nasty_tokenizers.byte_level()
DECODER = TextDecoder(TOKENIZER)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def test_pieces_are_the_text_up_to_the_stop_word() -> None:
    answer = AnswerText(DECODER, ["STOP"])
    pieces = [answer.push([token]) for token in ids("안녕 words. STOP more")]
    assert "".join(pieces) == answer.text == "안녕 words. "
    assert answer.stopped
    assert answer.finish() == ""


def test_what_might_have_been_a_stop_word_comes_in_the_end() -> None:
    answer = AnswerText(DECODER, ["STOP"])
    assert answer.push(ids("words ST")) == "words "
    assert answer.finish() == "ST"
    assert not answer.stopped


@pytest.mark.parametrize("cut", [0, 1, 3, 100])
def test_the_prompt_is_not_searched_for_stop_words(cut: int) -> None:
    prompt = ids("STOP here. ")
    tokens = [*prompt, *ids("words STOP")]
    answer = AnswerText(DECODER, ["STOP"], prompt)
    assert answer.push(tokens[:cut]) + answer.push(tokens[cut:]) + answer.finish() == "STOP here. words "
