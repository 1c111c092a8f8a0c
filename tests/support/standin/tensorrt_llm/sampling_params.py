"""The documented fields of SamplingParams (TensorRT-LLM 1.x) that a server can set, and their documented bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    n: int = 1
    best_of: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    bad: str | list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_p: float | None = None
    embedding_bias: Any = None
    return_context_logits: bool = False
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False
    guided_decoding: GuidedDecodingParams | None = None

    def __post_init__(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of {self.best_of} cannot be less than n {self.n}")
        if self.stop is not None and not all(isinstance(word, str) for word in self.stops):
            raise TypeError(f"stop must be texts, not {self.stop!r}")

    @property
    def changed(self) -> str:
        """The arguments that are not defaults."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        if given["embedding_bias"] is not None:
            bias = given["embedding_bias"]
            given["embedding_bias"] = {int(at): float(bias[at]) for at in bias.nonzero().flatten()}
        default = type(self)()
        return str({name: value for name, value in given.items() if value != getattr(default, name)})

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
