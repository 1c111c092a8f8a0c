"""From the chunks of an answer to what is kept of them, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from pipeline.cache.entry import Piece
from pipeline.client import Cached, Chunk, FinishReason


def pieces_of(chunks: Sequence[Chunk], began: float, times: Sequence[float]) -> tuple[Piece, ...]:
    """Chunks with the time (s) that each came after the one before it, or after the request began."""
    delays = [later - earlier for earlier, later in pairwise([began, *times])]
    return tuple(
        Piece(chunk.text, chunk.token_ids, chunk.log_probs, delay)
        for chunk, delay in zip(chunks, delays, strict=True)
    )


def chunks_of(
    pieces: Sequence[Piece], finish_reason: FinishReason, cached: Cached
) -> Iterator[tuple[float, Chunk]]:
    """The same chunks again, each with the time (s) that it had come after the one before it."""
    for index, piece in enumerate(pieces):
        reason = finish_reason if index == len(pieces) - 1 else None
        yield piece.delay_s, Chunk(piece.text, index, reason, piece.token_ids, piece.log_probs, cached)
