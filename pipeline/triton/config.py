"""A model's config.pbtxt, as typed values.

Only what our repositories use; `pbtxt` turns it into text and back, and refuses everything else.
Field names are Triton's (`inference.ModelConfig`), read with tritonclient 2.73.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.contracts.inflight_batcher import EnsembleStep, Tensor


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Triton's own queue in front of a model; 0 means no limit and no delay."""

    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model of a repository: executed by a backend, or an ensemble of others."""

    name: str
    max_batch_size: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    backend: str = ""  # python, tensorrtllm; "" for an ensemble
    instances: int = 0  # on the CPU; 0 for an ensemble
    decoupled: bool = False  # any number of responses to a request
    dynamic_batching: DynamicBatching | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[EnsembleStep, ...] = ()
