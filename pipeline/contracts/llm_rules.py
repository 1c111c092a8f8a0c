"""Rules of upstream across the fields of the LLM arguments, by the ids of data/llm_args.yaml.

Each rule reads arguments whose types are right already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.errors import Fault

Arguments = Mapping[str, Any]

_DRAFT_KEYS = ("speculative_model", "speculative_model_dir")
_WITH_LENGTH = ("NGram", "DraftTarget", "Draft_Target", "Eagle", "Eagle3")
_WITH_DRAFT = ("DraftTarget", "Draft_Target", "Eagle", "Eagle3")


def _section(arguments: Arguments, name: str) -> Arguments:
    return arguments.get(name) or {}


def _runs_two_models(speculation: Arguments) -> bool:
    match speculation.get("decoding_type"):
        case "NGram" | "DraftTarget" | "Draft_Target":
            return True
        case "Eagle" | "Eagle3":
            return speculation.get("eagle3_one_model", True) is False
        case "MTP":
            return speculation.get("mtp_eagle_one_model", True) is False
    return False


def two_models_without_overlap(arguments: Arguments) -> Iterator[Fault]:
    """Two-model speculation cannot run with the overlap scheduler."""
    speculation = _section(arguments, "speculative_config")
    if _runs_two_models(speculation) and not arguments.get("disable_overlap_scheduler", False):
        yield Fault(
            f"must be true with speculative_config.decoding_type {speculation['decoding_type']}, "
            "which runs two models in turns",
            key="disable_overlap_scheduler",
            value=arguments.get("disable_overlap_scheduler"),
        )


def draft_length_given(arguments: Arguments) -> Iterator[Fault]:
    """A number of tokens to propose, more than 0."""
    speculation = _section(arguments, "speculative_config")
    length = speculation.get("max_draft_len")
    if speculation.get("decoding_type") in _WITH_LENGTH and (length is None or length < 1):
        yield Fault("must be more than 0", key="speculative_config.max_draft_len", value=length)


def draft_checkpoint_given(arguments: Arguments) -> Iterator[Fault]:
    """A checkpoint, where a model proposes."""
    speculation = _section(arguments, "speculative_config")
    chosen = speculation.get("decoding_type")
    if chosen in _WITH_DRAFT and not any(speculation.get(key) for key in _DRAFT_KEYS):
        yield Fault(f"names no draft, which {chosen} needs", key="speculative_config")


def graph_sizes(largest: int, *, padding: bool) -> list[int]:
    """Batch sizes that upstream captures up to the largest, in order."""
    small = [1, 2, 4, *range(8, 129, 8)] if padding else [*range(1, 33), 64, 128]
    powers = [2**exponent for exponent in range(8, math.ceil(math.log2(largest)))] if largest > 1 else []
    sizes = sorted(size for size in (*small, *powers) if size <= largest)
    return sizes if sizes[-1:] == [largest] else [*sizes, largest]


def one_size_of_graphs(arguments: Arguments) -> Iterator[Fault]:
    """Sizes, or the largest of them; both only if upstream would derive the ones from the other."""
    graphs = _section(arguments, "cuda_graph_config")
    sizes, largest = graphs.get("batch_sizes"), graphs.get("max_batch_size", 0)
    padding = bool(graphs.get("enable_padding", False))
    if sizes and largest and sorted(sizes) != graph_sizes(largest, padding=padding):
        yield Fault(
            "is given, and max_batch_size too; upstream takes one of them",
            key="cuda_graph_config.batch_sizes",
            value=sizes,
        )


def largest_size_of_graphs(arguments: Arguments) -> Iterator[Fault]:
    """The largest size, if both are given."""
    graphs = _section(arguments, "cuda_graph_config")
    sizes, largest = graphs.get("batch_sizes"), graphs.get("max_batch_size", 0)
    if sizes and largest and max(sizes) != largest:
        yield Fault(
            f"must be the largest of batch_sizes, {max(sizes)}",
            key="cuda_graph_config.max_batch_size",
            value=largest,
        )


def ray_only(arguments: Arguments) -> Iterator[Fault]:
    """Settings that only the ray orchestrator reads."""
    for key in ("ray_worker_extension_cls", "ray_placement_config"):
        if arguments.get(key) is not None and arguments.get("orchestrator_type") != "ray":
            yield Fault("needs orchestrator_type ray", key=key, value=arguments[key])


def no_lora_prefetch(arguments: Arguments) -> Iterator[Fault]:
    """A setting that exists and is not supported."""
    folder = _section(arguments, "peft_cache_config").get("lora_prefetch_dir")
    if folder is not None:
        yield Fault("is not supported", key="peft_cache_config.lora_prefetch_dir", value=folder)


def expert_sizes(arguments: Arguments) -> Iterator[Fault]:
    """The groups of experts share the tensor-parallel GPUs without a rest."""
    tensor = arguments.get("tensor_parallel_size", 1)
    product = 1
    for key in ("moe_tensor_parallel_size", "moe_expert_parallel_size", "moe_cluster_parallel_size"):
        size = arguments.get(key)
        product *= size if size is not None and size > 0 else 1
    if tensor % product:
        yield Fault(
            f"must be a multiple of moe_tensor_parallel_size x moe_expert_parallel_size, which is {product}",
            key="tensor_parallel_size",
            value=tensor,
        )


RULES: Mapping[str, Callable[[Arguments], Iterator[Fault]]] = {
    rule.__name__: rule
    for rule in (
        two_models_without_overlap, draft_length_given, draft_checkpoint_given, one_size_of_graphs,
        largest_size_of_graphs, ray_only, no_lora_prefetch, expert_sizes,
    )
}  # fmt: skip
