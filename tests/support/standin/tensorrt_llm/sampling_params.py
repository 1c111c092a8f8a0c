"""The parameters of the release, with the bounds that upstream holds them to."""

from __future__ import annotations

from typing import Any

from tensorrt_llm.release import Parameters


class GuidedDecodingParams(Parameters):
    def check(self) -> None:
        if len(self.changed) > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {len(self.changed)}.")


class SamplingParams(Parameters):
    n: int
    best_of: int | None
    top_k: int | None
    top_p: float | None
    temperature: float | None
    stop: str | list[str] | None
    embedding_bias: Any

    def check(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of {self.best_of} cannot be less than n {self.n}")
        if self.stop is not None and not all(isinstance(word, str) for word in self.stops):
            raise TypeError(f"stop must be texts, not {self.stop!r}")

    @property
    def changed(self) -> dict[str, Any]:
        bias, self.embedding_bias = self.embedding_bias, None  # a tensor does not compare
        try:
            given = super().changed
        finally:
            self.embedding_bias = bias
        if bias is not None:
            given["embedding_bias"] = {int(at): float(bias[at]) for at in bias.nonzero().flatten()}
        return given

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
