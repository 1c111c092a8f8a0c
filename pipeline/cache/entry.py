"""A complete answer as it is stored: its chunks, why it ended, and how fast it came.

In bytes: a head of fixed size, the text, and one array each for the lengths of the chunks, the time before them, and
their tokens. A lookup reads the head only; the chunks are decoded when the answer is replayed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.client import FinishReason

FORMAT = 1
# format, finish reason, what the arrays hold, chunks, bytes of text, input and output tokens, created and expires (s)
_HEAD = struct.Struct("<BBHIIiidd")
_REASONS: tuple[FinishReason, ...] = ("stop", "unknown")
_HAS_TOKENS, _HAS_LOG_PROBS = 1, 2
# Resolution of the time before a chunk; 16 bits hold 6.5 s.
_DELAY_UNIT_S = 1e-4


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One chunk of a stored answer. `delay_s` counts from the chunk before it, or from the request."""

    text: str
    token_ids: tuple[int, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A complete answer, packed. Times are s since the epoch; `finish_reason` is never "length"."""

    raw: bytes
    created: float
    expires: float
    finish_reason: FinishReason

    @classmethod
    def of(
        cls,
        pieces: Sequence[StoredChunk],
        *,
        finish_reason: FinishReason,
        created: float,
        expires: float,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> Self:
        """Pack an answer. Times are s since the epoch; token counts are None if the server did not say.

        Raises:
            ValueError: the answer was cut off (`finish_reason` is length).
        """
        if finish_reason not in _REASONS:
            raise ValueError(f"an answer that ended by {finish_reason} is not complete")
        texts = [piece.text.encode() for piece in pieces]
        tokens = [piece.token_ids for piece in pieces]
        log_probs = [piece.log_probs for piece in pieces]
        flags = (_HAS_TOKENS if any(t is not None for t in tokens) else 0) | (
            _HAS_LOG_PROBS if any(p is not None for p in log_probs) else 0
        )
        delays = [min(round(piece.delay_s / _DELAY_UNIT_S), 65535) for piece in pieces]
        parts = [
            _HEAD.pack(
                FORMAT,
                _REASONS.index(finish_reason),
                flags,
                len(pieces),
                sum(map(len, texts)),
                -1 if input_tokens is None else input_tokens,
                -1 if output_tokens is None else output_tokens,
                created,
                expires,
            ),
            *texts,
            np.array([len(text) for text in texts], "<u4").tobytes(),
            np.array(delays, "<u2").tobytes(),
        ]
        for has, rows, kind in ((_HAS_TOKENS, tokens, "<i4"), (_HAS_LOG_PROBS, log_probs, "<f4")):
            if flags & has:
                parts += [
                    np.array([len(row or ()) for row in rows], "<u2").tobytes(),
                    *(np.array(row or (), kind).tobytes() for row in rows),
                ]
        return cls(b"".join(parts), created, expires, finish_reason)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Read the head. Raises ValueError if the format is unknown."""
        try:
            form, reason, _, _, _, _, _, created, expires = _HEAD.unpack_from(raw)
        except struct.error as error:
            raise ValueError(f"{len(raw)} bytes are not an answer: {error}") from None
        if form != FORMAT or reason >= len(_REASONS):
            raise ValueError(f"an answer of format {form} cannot be read, only {FORMAT}")
        return cls(raw, created, expires, _REASONS[reason])

    @property
    def text(self) -> str:
        return self.raw[_HEAD.size : _HEAD.size + self._head[4]].decode()

    @property
    def input_tokens(self) -> int | None:
        """Tokens of the prompt; None if the server did not say."""
        return None if self._head[5] < 0 else self._head[5]

    @property
    def output_tokens(self) -> int | None:
        """Tokens of the answer; None if the server did not say."""
        return None if self._head[6] < 0 else self._head[6]

    def pieces(self) -> tuple[StoredChunk, ...]:
        """Decode the chunks as they came."""
        _, _, flags, count, text_bytes, *_ = self._head
        at = _HEAD.size + text_bytes
        lengths, at = self._array("<u4", count, at)
        delays, at = self._array("<u2", count, at)
        tokens: Sequence[tuple[int, ...] | None] = [None] * count
        log_probs: Sequence[tuple[float, ...] | None] = [None] * count
        if flags & _HAS_TOKENS:
            tokens, at = self._rows("<i4", count, at)
        if flags & _HAS_LOG_PROBS:
            log_probs, at = self._rows("<f4", count, at)
        ends = _HEAD.size + np.cumsum(lengths)
        return tuple(
            StoredChunk(
                self.raw[end - length : end].decode(),
                tokens[i],
                log_probs[i],
                float(delays[i]) * _DELAY_UNIT_S,
            )
            for i, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True))
        )

    @property
    def _head(self) -> tuple[int, int, int, int, int, int, int, float, float]:
        return _HEAD.unpack_from(self.raw)

    def _array(self, kind: str, count: int, at: int) -> tuple[NDArray[Any], int]:
        array = np.frombuffer(self.raw, kind, count, at)
        return array, at + array.nbytes

    def _rows(self, kind: str, count: int, at: int) -> tuple[list[tuple[Any, ...]], int]:
        sizes, at = self._array("<u2", count, at)
        rows: list[tuple[Any, ...]] = []
        for size in sizes.tolist():
            row, at = self._array(kind, size, at)
            rows.append(tuple(row.tolist()))
        return rows, at
