"""The folder that trtllm-build leaves: what its config.json says the engine can do, and the plan of each rank.

The builder changes some of what it was asked for without failing, so these values, and not the flags, are what an
engine is. Read only; keys are those of TensorRT-LLM 1.0 to 1.2 (`version`, `pretrained_config`, `build_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pipeline.contracts.trtllm_build import speculative_modes
from pipeline.errors import StageError
from pipeline.reading import UnreadableFile, read_json


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """A built engine. Names are upstream's; sizes of the model are those of all ranks together."""

    version: str  # of TensorRT-LLM that built it
    dtype: str  # bfloat16, float16
    logits_dtype: str  # float32, float16
    quantization: str | None  # quant_algo: FP8, W4A16_AWQ, …
    kv_cache_quantization: str | None  # kv_cache_quant_algo: FP8, INT8
    vocab_size: int  # as the checkpoint has it; logits may be padded further for the ranks
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    experts: int  # 0: not a mixture of experts
    tensor_parallel: int
    pipeline_parallel: int
    max_batch_size: int
    max_input_len: int
    max_seq_len: int  # with max_draft_len
    max_num_tokens: int
    max_draft_len: int  # 0: it verifies no drafts
    verifies_drafts: bool  # built with speculative_decoding_mode draft_tokens_external
    tokens_per_block: int
    use_paged_context_fmha: bool
    gather_context_logits: bool
    rank_bytes: tuple[int, ...]  # of rank<N>.engine and its managed weights

    @property
    def world_size(self) -> int:
        """Ranks, which is GPUs."""
        return self.tensor_parallel * self.pipeline_parallel

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The engine in a folder.

        Raises:
            StageError: A file is missing, or config.json lacks a key.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise StageError(f"{folder}: no config.json: not the folder of an engine")
        try:
            config = read_json(path)
        except UnreadableFile as error:
            raise StageError(str(error)) from None
        try:
            return cls(**_values(config), rank_bytes=_rank_bytes(folder, config))
        except KeyError as error:
            raise StageError(f"{path}: no key {error.args[0]}") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise StageError(f"{path}: has a value of another kind than it should: {error}") from None


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    model, build = config["pretrained_config"], config["build_config"]
    plugins, mapping = build["plugin_config"], model["mapping"]
    quantization = model.get("quantization") or {}
    heads = model["num_attention_heads"]
    return {
        "version": config["version"],
        "dtype": model["dtype"],
        "logits_dtype": model.get("logits_dtype", "float32"),
        "quantization": quantization.get("quant_algo"),
        "kv_cache_quantization": quantization.get("kv_cache_quant_algo"),
        "vocab_size": model["vocab_size"],
        "layers": model["num_hidden_layers"],
        "heads": heads,
        "kv_heads": model.get("num_key_value_heads") or heads,
        "head_size": model.get("head_size") or model["hidden_size"] // heads,
        "experts": (model.get("moe") or {}).get("num_experts", 0),
        "tensor_parallel": mapping["tp_size"],
        "pipeline_parallel": mapping["pp_size"],
        "max_batch_size": build["max_batch_size"],
        "max_input_len": build["max_input_len"],
        "max_seq_len": build["max_seq_len"],
        "max_num_tokens": build["max_num_tokens"],
        "max_draft_len": build["max_draft_len"],
        "verifies_drafts": build["speculative_decoding_mode"] == speculative_modes()["draft_tokens_external"],
        "tokens_per_block": plugins["tokens_per_block"],
        "use_paged_context_fmha": plugins["use_paged_context_fmha"],
        "gather_context_logits": build.get("gather_context_logits", False),
    }


def _rank_bytes(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = []
    for rank in range(config["pretrained_config"]["mapping"]["world_size"]):
        plan = folder / f"rank{rank}.engine"
        if not plan.is_file():
            raise StageError(f"{folder}: no {plan.name}")
        weights = folder / f"rank{rank}_managed_weights.safetensors"
        sizes.append(plan.stat().st_size + (weights.stat().st_size if weights.is_file() else 0))
    return tuple(sizes)
