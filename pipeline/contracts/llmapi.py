"""The `llmapi` model of TensorRT-LLM for Triton, by version: its tensors, and which settings it has.

The facts, behaviours among them, are data (`data/llmapi.yaml`, each with its source); this answers from them.

>>> [tensor.name for tensor in tensors("1.0.0").outputs][:4]
['text_output', 'finish_reason', 'stop_reason', 'cumulative_logprob']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.contracts import read_facts, record
from pipeline.contracts.inflight_batcher import ModelTensors, TensorSpec
from pipeline.contracts.version_range import entries_in, listed


def versions() -> tuple[str, ...]:
    """Versions of TensorRT-LLM whose model is known, oldest first."""
    return tuple(_data()["versions"])


def tensors(version: str) -> ModelTensors:
    """List inputs and outputs in a version, in upstream's order; they have no batch dimension."""
    return _tensors(version, "input", "output")


def triton_config(version: str) -> Mapping[str, Any]:
    """The model's own settings in model.yaml, with their defaults."""
    return {entry["name"]: entry["default"] for entry in _holding("triton_config", version)}


def versions_where(holds: Callable[[str], bool]) -> str:
    """Name the versions of which something is true, such as `has_instances`."""
    return listed([version for version in versions() if holds(version)])


def has_instances(version: str) -> bool:
    """Whether there may be several instances, each on GPUs of its own."""
    return _is_so("several_instances", version)


def guides_with_overlap(version: str) -> bool:
    """Whether guided decoding works beside the overlap scheduler."""
    return _is_so("guided_decoding_with_overlap", version)


def takes_structural_tags(version: str) -> bool:
    """Whether a guide may be a structural tag as xgrammar has it since 0.1.25."""
    return _is_so("structural_tags", version)


def guides_with_speculation(version: str) -> bool:
    """Whether guided decoding works beside speculation."""
    return _is_so("guided_decoding_with_speculation", version)


def returns_context_logits(version: str) -> bool:
    """Whether the PyTorch backend returns the logits of prompts."""
    return _is_so("context_logits", version)


def graphs_adapters(version: str) -> bool:
    """Whether CUDA graphs and LoRA adapters work together."""
    return _is_so("lora_with_cuda_graphs", version)


def lora_module(version: str, layer: str) -> str | None:
    """Return upstream's name of the kind of a linear layer that adapters are applied to; None: they are not.

    >>> lora_module("1.2.1", "layers.0.self_attn.q_proj"), lora_module("1.2.1", "layers.0.mlp.gate")
    ('attn_q', None)
    """
    entries = [entry for entry in _holding("lora_modules", version) if layer.endswith(f".{entry['layer']}")]
    if ".shared_expert" in layer:
        entries = [entry for entry in entries if "shared_expert." in entry["layer"]]
    return max(entries, key=lambda entry: len(entry["layer"]))["name"] if entries else None


def ignored_sampling(version: str) -> tuple[str, ...]:
    """Arguments of SamplingParams that the PyTorch backend's default sampler ignores."""
    return tuple(entry["name"] for entry in _holding("ignored_sampling", version))


def own_tensors(version: str) -> ModelTensors:
    """List what our model takes and returns beyond upstream's, because the LLM API of a version has it."""
    return _tensors(version, "own_input", "own_output")


def fp8_cache_scale() -> float:
    """The scale of an FP8 KV cache in the PyTorch backend, which reads none from the checkpoint."""
    value: float = _data()["facts"]["fp8_cache_scale"]["value"]
    return value


def tokens_per_block() -> int:
    """Tokens that one block of the PyTorch backend's KV cache holds by default."""
    value: int = _data()["facts"]["tokens_per_block"]["value"]
    return value


def _is_so(fact: str, version: str) -> bool:
    return any(entries_in([_data()["facts"][fact]], version, versions()))


def _holding(section: str, version: str) -> Iterator[Mapping[str, Any]]:
    return entries_in(_data()[section], version, versions())


def _tensors(version: str, *sections: str) -> ModelTensors:
    return ModelTensors(
        *(tuple(record(TensorSpec, entry) for entry in _holding(section, version)) for section in sections)
    )


def _data() -> Mapping[str, Any]:
    return read_facts("llmapi.yaml")
