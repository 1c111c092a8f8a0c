"""Stop and bad words match where a search through the whole text says so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtimes.cpu.engine.sequence import WordList

WORDS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4)
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(WORDS, TEXT)
def test_ends(words: list[list[int]], text: list[int]) -> None:
    assert WordList(words).ends(text) == any(text[-len(word) :] == word for word in words)


@given(WORDS, st.lists(st.integers(0, 2), max_size=8))
def test_completions(words: list[list[int]], text: list[int]) -> None:
    expected = {token for token in range(3) if WordList(words).ends([*text, token])}
    assert sorted(WordList(words).completions(text)) == sorted(expected)
