"""TensorRT-LLM checkpoints that are only as deep as a builder's stand-in looks: config.json, and bytes for weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.plan.parallelism import Parallelism
from pipeline.runtimes.tensorrt.flags import ALGORITHMS


def rank_config(
    *,
    weights: str = "none",
    kv_cache: str | None = None,
    sizes: Parallelism | None = None,
    architecture: str = "LlamaForCausalLM",
) -> dict[str, Any]:
    """config.json of a small Llama. `weights`: in the recipe's words; `kv_cache`: in upstream's."""
    sizes = sizes or Parallelism()
    return {
        "architecture": architecture,
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_size": 32,
        "max_position_embeddings": 131072,
        "position_embedding_type": "rope_gpt_neox",
        "hidden_act": "silu",
        "mapping": {
            "world_size": sizes.world,
            "tp_size": sizes.tensor,
            "pp_size": sizes.pipeline,
            "moe_tp_size": sizes.tensor // sizes.expert,
            "moe_ep_size": sizes.expert,
        },
        "quantization": {"quant_algo": ALGORITHMS[weights], "kv_cache_quant_algo": kv_cache},
    }


def make_ranks(folder: Path, *, rank_bytes: int = 3000, **config: Any) -> Path:
    """Write config.json and a file for each rank into a new folder; the folder."""
    folder.mkdir(parents=True)
    content = rank_config(**config)
    (folder / "config.json").write_text(json.dumps(content))
    for rank in range(content["mapping"]["world_size"]):
        (folder / f"rank{rank}.safetensors").write_bytes(bytes([rank]) * rank_bytes)
    return folder
