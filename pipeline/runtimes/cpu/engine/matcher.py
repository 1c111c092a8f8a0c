"""Masks over the vocabulary for guided decoding, also of drafts."""

from __future__ import annotations

from collections import abc
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

Mask = npt.NDArray[np.bool_]


class Matcher:
    """
    >>> matcher = Grammars(vocabulary, 2048).matcher(Guide("regex", "[0-9]+"), ends=[2])   # doctest: +SKIP
    >>> matcher.allowed([]).nonzero()                                                     # doctest: +SKIP
    """

    __slots__ = (
        "_ahead",
        "_closing",
        "_ends",
        "_inner",
        "_masks",
        "_size",
        "_special",
        "_vocab_size",
        "fault",
    )

    def __init__(
        self,
        inner: LLMatcher,
        *,
        size: int,
        vocab_size: int,
        end: int,
        ends: Collection[int],
        closing: Collection[int] = (),
    ) -> None:
        """
        Args:
            inner: At the beginning of the form.
            size: Tokens that `inner` knows; `vocab_size`: tokens that the model has logits for.
            end: The token with which `inner` says that the answer may end.
            ends: The tokens that end this answer.
            closing: Special tokens of `ends`, which also come where the form asks for them.
        """
        self._inner = inner
        self._size, self._vocab_size = size, vocab_size
        self._ends, self._closing = list(ends), list(closing)
        self._special = frozenset((end, *ends))
        self._ahead: list[int] = []  # drafts that `inner` has taken, after the answer
        self._masks: dict[tuple[int, ...], Mask | None] = {}  # by drafts, for the answer as it is
        self.fault: str | None = None  # why the answer cannot go on

    def allowed(self, ahead: abc.Sequence[int]) -> Mask | None:
        """[vocab_size], true for the tokens that may follow the answer and the drafts `ahead` of it.

        None where those drafts themselves may not come, so that they will not be kept; or where nothing may follow.
        """
        key = tuple(ahead)
        if key not in self._masks:
            self._masks[key] = self._mask() if self._go(ahead) else None
        return self._masks[key]

    def append(self, token: int) -> None:
        """Append a token of the answer; `fault` is set if the guide forbids it."""
        self._masks.clear()
        if self._ahead[:1] == [token]:
            del self._ahead[0]
            return
        self._back(0)
        if token in self._ends:
            closes = token in self._closing and self._inner.try_consume_tokens([token]) == 1
            fits = closes or self._inner.is_accepting()
        else:
            fits = self._take(token)
        if not fits:
            why = " ".join(self._inner.get_error().split()).removesuffix(" <non-verbose/>")
            why = why or "no token that the model may choose keeps to the form"
            self.fault = f"guided_decoding_guide: the answer cannot go on: {why}"

    @property
    def complete(self) -> bool:
        """Whether the form is whole, and nothing can follow."""
        return not self._ahead and self._inner.is_stopped()

    def _go(self, ahead: abc.Sequence[int]) -> bool:
        common = next(
            (at for at, (new, old) in enumerate(zip(ahead, self._ahead, strict=False)) if new != old),
            min(len(ahead), len(self._ahead)),
        )
        self._back(common)
        for token in ahead[common:]:
            if not self._take(token):
                return False
            self._ahead.append(token)
        return True

    def _back(self, kept: int) -> None:
        """Roll back to the first `kept` drafts."""
        if len(self._ahead) > kept:
            self._inner.rollback(len(self._ahead) - kept)
            del self._ahead[kept:]

    def _take(self, token: int) -> bool:
        return token not in self._special and self._inner.try_consume_tokens([token]) == 1

    def _mask(self) -> Mask | None:
        if self._inner.is_stopped():
            self.fault = self._inner.get_error() or self.fault
            return None
        bits = np.zeros(-(-self._size // 32), np.uint32)
        self._inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        known = min(self._size, self._vocab_size)
        mask = np.zeros(self._vocab_size, np.bool_)
        mask[:known] = np.unpackbits(bits.view(np.uint8), count=known, bitorder="little")
        closing = mask[self._closing]
        mask[list(self._special)] = False
        mask[self._closing] = closing
        mask[self._ends] |= self._inner.is_accepting()
        return mask if mask.any() else None
