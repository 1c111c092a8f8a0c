"""How an answer came: measured by the client's clock, with the server's own counts where it sends them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Cached:
    """That an answer, or a part of it, did not come from the model for this request."""

    kind: Literal["exact", "semantic", "shared"]  # shared: of an equal request that was running
    similarity: float = 1.0  # cosine of the two questions


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one answer; those that are not known (yet) are None.

    A chunk may hold several tokens (accepted draft tokens, characters that need more than one token), so that
    `itl_ms` has one entry fewer than there are chunks, while `tpot_ms` is per token.
    """

    ttft_ms: float | None = None  # from sending to the first chunk
    itl_ms: tuple[float, ...] = ()  # from each chunk to the next
    total_ms: float | None = None  # from sending to the end
    chunks: int = 0  # that had content
    input_tokens: int | None = None
    output_tokens: int | None = None
    draft_tokens: int | None = None  # proposed by the draft
    accepted_tokens: int | None = None  # of those, kept
    cached: Cached | None = None  # where a response cache answered

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first chunk: sum of the ITL / (tokens - 1)."""
        if self.output_tokens is None or self.output_tokens < 2 or not self.itl_ms:
            return None
        return sum(self.itl_ms) / (self.output_tokens - 1)

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens over the whole time, the wait for the first included."""
        if not self.output_tokens or not self.total_ms:
            return None
        return self.output_tokens / self.total_ms * 1e3

    @property
    def acceptance(self) -> float | None:
        """Share of the draft's tokens that were kept, 0 to 1."""
        if self.draft_tokens is None or self.accepted_tokens is None or self.draft_tokens <= 0:
            return None
        return self.accepted_tokens / self.draft_tokens

    def itl_percentile(self, percent: float) -> float | None:
        """`percentile(itl_ms, percent)`, None if there were fewer than two chunks."""
        return percentile(self.itl_ms, percent) if self.itl_ms else None

    def as_dict(self) -> dict[str, object]:
        """Everything, derived figures included, for JSON."""
        derived = {"tpot_ms": self.tpot_ms, "tokens_per_s": self.tokens_per_s, "acceptance": self.acceptance}
        return {**asdict(self), "itl_ms": list(self.itl_ms), **derived}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values, as numpy's default.

    >>> percentile([1.0, 2.0, 4.0], 50), percentile([1.0, 2.0, 4.0], 75)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
