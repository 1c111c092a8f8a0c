"""Entries: what goes in comes out, whatever the chunks are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cache.entry import CacheEntry, StoredChunk

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
DELAYS = st.integers(0, 60_000).map(lambda n: n / 1e4)
PIECES = st.lists(st.builds(StoredChunk, text=TEXTS, delay_s=DELAYS), min_size=1, max_size=8)


@given(PIECES, st.none() | st.integers(0, 10**6))
def test_round_trip(pieces: list[StoredChunk], tokens: int | None) -> None:
    entry = CacheEntry.of(
        pieces, finish_reason="stop", created=1.5, expires=3.5, input_tokens=tokens, output_tokens=3
    )
    again = CacheEntry.from_bytes(entry.raw)
    assert again == entry
    assert again.text == "".join(piece.text for piece in pieces)
    assert (again.input_tokens, again.output_tokens) == (tokens, 3)
    assert [piece.text for piece in again.pieces()] == [piece.text for piece in pieces]
    assert [piece.delay_s for piece in again.pieces()] == pytest.approx(
        [piece.delay_s for piece in pieces], abs=1e-4
    )


@given(st.lists(TOKENS, min_size=1, max_size=5))
def test_tokens_and_log_probs_come_back(rows: list[tuple[int, ...]]) -> None:
    pieces = [StoredChunk("é", row, tuple(-0.5 for _ in row)) for row in rows]
    again = CacheEntry.from_bytes(CacheEntry.of(pieces, finish_reason="unknown", created=0, expires=1).raw)
    assert [(piece.text, piece.token_ids, piece.log_probs) for piece in again.pieces()] == [
        (piece.text, piece.token_ids, piece.log_probs) for piece in pieces
    ]


def test_an_answer_that_was_cut_is_not_an_entry() -> None:
    with pytest.raises(ValueError, match="not complete"):
        CacheEntry.of([StoredChunk("a")], finish_reason="length", created=0, expires=1)


@pytest.mark.parametrize("raw", [b"", b"\x01", b"\x07" + bytes(60)])
def test_what_is_not_an_entry(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"not an answer|cannot be read"):
        CacheEntry.from_bytes(raw)
