"""Stop and bad words in and out of the form that TensorRT-LLM takes, and stop words in text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared.stop_words import StopText, pack, unpack

words = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=5)


@given(st.lists(words, min_size=1, max_size=4))
def test_packed_words_unpack(batch: list[list[list[int]]]) -> None:
    packed = pack(batch)
    assert packed.dtype == np.int32
    assert packed.shape[:2] == (len(batch), 2)
    for row, given_words in zip(packed, batch, strict=True):
        assert unpack(row) == tuple(tuple(word) for word in given_words if word)


def test_packed_as_upstream_documents_it() -> None:
    assert pack([[[5], [8, 9]], [[7]]]).tolist() == [[[5, 8, 9], [1, 3, -1]], [[7, 0, 0], [1, -1, -1]]]
    assert pack([[], []]).shape == (2, 2, 0)


@pytest.mark.parametrize("packed", [[[1, 2], [2, 1]], [[1, 2], [1, 3]], [[1], [0]], [[1, 2]]])
def test_ends_that_do_not_fit_are_refused(packed: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"ends|shape"):
        unpack(np.array(packed, np.int32))


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
)
def test_text_goes_out_up_to_the_first_stop_word(pieces: list[str], stops: list[str]) -> None:
    watch = StopText(stops)
    out = "".join([watch.push(piece) for piece in pieces])
    out += watch.finish()
    text = "".join(pieces)
    ends = [text.find(word) for word in stops if word in text]
    assert watch.stopped == bool(ends)
    if not ends:
        assert out == text
    else:  # the word that was whole first; another may begin before it
        assert text.startswith(out)
        assert not any(word in out for word in stops)
        assert any(text.startswith(word, len(out)) for word in stops)


def test_text_waits_only_while_it_may_be_a_stop_word() -> None:
    watch = StopText(["\nUser:"])
    assert watch.push("Sure.\nUs") == "Sure."
    assert watch.push("e a lamp") == "\nUse a lamp"
    assert watch.push("\nUser: hi") == ""
    assert watch.stopped
    assert watch.push("more") == ""
