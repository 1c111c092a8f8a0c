"""Published measurements of GPU memory, which the memory model is compared with (`data/memory_measurements.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contracts import read_facts
from pipeline.models.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """How many sequences of isl + osl + 1000 tokens a KV cache held; max_num_tokens was 2 * isl."""

    gpu: str
    model: str  # repository; its weights as published
    tensor_parallel: int
    fraction: float
    isl: int  # prompt tokens
    osl: int  # answer tokens
    sequences: int
    source: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadLog:
    """Memory that an engine's log reported when it was loaded."""

    gpu: str
    format: str
    kv_cache: str
    fraction: float
    block_tokens: int
    config: Mapping[str, Any]  # of the model, as config.json has it
    engine_mib: float  # weights
    context_mib: float  # activations
    runtime_mib: float
    total_gib: float
    available_gib: float  # after all of it
    blocks: int
    source: tuple[str, ...]

    @property
    def sizes(self) -> ModelSizes:
        """Sizes of the model."""
        sizes = ModelSizes.from_config(self.config)
        assert sizes is not None, "the data are read by a test"
        return sizes


def capacity_points() -> tuple[CapacityPoint, ...]:
    """List all published capacities of KV caches."""
    return tuple(CapacityPoint(**_sourced(entry)) for entry in _data()["capacity"])


def load_logs() -> tuple[LoadLog, ...]:
    """List all published logs of engines."""
    return tuple(LoadLog(**_sourced(entry)) for entry in _data()["load_logs"])


def _sourced(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "source": tuple(_data()["sources"][name] for name in entry["source"])}


def _data() -> Mapping[str, Any]:
    return read_facts("memory_measurements.yaml")
