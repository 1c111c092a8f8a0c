"""Sizes of an engine. Limits of the model itself (positions, vocabulary) are read from its `engine.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of one engine."""

    max_concurrency: int = 8  # sequences that run at once; more wait
    # Tokens computed in one step; longer prompts are computed in chunks. None: `PagedModel.step_tokens`.
    max_batch_tokens: int | None = None
    max_sequence_tokens: int | None = None  # prompt and answer together; None: all positions the model has
    kv_blocks: int | None = None  # blocks of 32 tokens; None: from kv_cache_mib
    kv_cache_mib: int | None = (
        None  # target and draft together; None: room for max_concurrency full sequences
    )
    max_draft_tokens: int = 5  # tokens proposed by the draft model, or by the caller, for one step
    prefix_caching: bool = True
    threads: int | None = None  # None: OpenVINO decides
    precision: Literal["auto", "f32", "bf16"] = (
        "auto"  # auto: bf16 where processor and model gain by it; f32 is exact
    )
    adapt_speculation: bool = (
        True  # draft only while it is measured to pay; the answer is the same either way
    )

    def __post_init__(self) -> None:
        for name in (
            "max_concurrency",
            "max_batch_tokens",
            "max_sequence_tokens",
            "kv_blocks",
            "kv_cache_mib",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be 1 or more")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens is {self.max_draft_tokens}, must be 0 or more")
        if self.precision not in ("auto", "f32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}, must be 'auto', 'f32' or 'bf16'")
