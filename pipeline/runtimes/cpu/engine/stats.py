"""Counters and gauges of the engine, for metrics and health checks."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from .block_manager import BlockManager
from .request import FinishReason
from .scheduler import BatchScheduler
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Totals count from the start of the engine."""

    running: int
    waiting: int
    kv_blocks_total: int  # of all layers: those of windows count apart, as in TensorRT-LLM
    kv_blocks_used: int
    kv_blocks_free: int  # those with reusable content included
    kv_blocks_reused: int  # found in the KV cache instead of computed; a total
    tokens_per_block: int
    steps: int
    stepped_at: float  # when the last step ended, in s since the epoch; 0 before the first
    context_requests: int  # of the last step: sequences whose prompt it computed, or a part of it
    context_tokens: int  # of the last step: tokens of prompts
    generation_requests: int  # of the last step: sequences that it decoded
    mean_batch: float  # sequences a step
    prompt_tokens: int
    prompt_tokens_reused: int  # found in the KV cache
    generated_tokens: int
    draft_tokens_total: int
    draft_tokens_accepted: int
    finished: dict[FinishReason, int]
    precision: str  # type that the target computes in: "f32" or "bf16"

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that the target accepted; 0 if none were proposed."""
        return self.draft_tokens_accepted / self.draft_tokens_total if self.draft_tokens_total else 0.0


@dataclass(slots=True)
class EngineCounters:
    """Running totals; written by the engine thread only."""

    steps: int = 0
    stepped_at: float = 0.0
    context_requests: int = 0
    context_tokens: int = 0
    sequences: int = 0
    last_sequences: int = 0
    kv_blocks_reused: int = 0
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    generated_tokens: int = 0
    draft_tokens_total: int = 0
    draft_tokens_accepted: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def admit(self, sequence: Sequence) -> None:
        """Count a sequence that starts."""
        self.prompt_tokens += len(sequence.request.prompt)
        if sequence.target:
            self.prompt_tokens_reused += sequence.target.filled
            self.kv_blocks_reused += sequence.target.reused

    def step(self, context_tokens: Items[int], sequences: int, generated_tokens: int) -> None:
        """Count a step.

        Args:
            context_tokens: Tokens of each prompt, or part of one, that it computed.
            sequences: All that it computed.
            generated_tokens: Tokens that were generated.
        """
        self.context_requests, self.context_tokens = len(context_tokens), sum(context_tokens)
        self.last_sequences = sequences
        self.steps += 1
        self.sequences += sequences
        self.generated_tokens += generated_tokens
        self.stepped_at = time.time()

    def snapshot(self, scheduler: BatchScheduler, blocks: BlockManager, precision: str) -> EngineStats:
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_total=blocks.num_blocks,
            kv_blocks_used=blocks.used,
            kv_blocks_free=blocks.num_blocks - blocks.used,
            kv_blocks_reused=self.kv_blocks_reused,
            tokens_per_block=blocks.layout.block_size,
            steps=self.steps,
            stepped_at=self.stepped_at,
            context_requests=self.context_requests if scheduler.running else 0,
            context_tokens=self.context_tokens if scheduler.running else 0,
            generation_requests=self.last_sequences - self.context_requests if scheduler.running else 0,
            mean_batch=self.sequences / self.steps if self.steps else 0.0,
            prompt_tokens=self.prompt_tokens,
            prompt_tokens_reused=self.prompt_tokens_reused,
            generated_tokens=self.generated_tokens,
            draft_tokens_total=self.draft_tokens_total,
            draft_tokens_accepted=self.draft_tokens_accepted,
            finished=dict(self.finished),
            precision=precision,
        )
