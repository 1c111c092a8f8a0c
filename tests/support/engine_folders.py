"""Engine folders as trtllm-build leaves them: config.json in upstream's shape, and plans of a few bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUANTIZATIONS: dict[str, str | None] = {  # recipe's format -> upstream's quant_algo
    "none": None,
    "fp8": "FP8",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
    "nvfp4": "NVFP4",
}


def engine_config(
    *,
    version: str = "1.2.1",
    quantization: str = "none",
    kv_cache: str | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    vocab_size: int = 2048,
    max_draft_len: int = 0,
    paged_context_fmha: bool = True,
    logits_dtype: str = "float32",
    **build: Any,
) -> dict[str, Any]:
    """config.json of a Llama 3.1 8B; `build` replaces values of its build_config."""
    world = tensor_parallel * pipeline_parallel
    return {
        "version": version,
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "logits_dtype": logits_dtype,
            "vocab_size": vocab_size,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_size": 128,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mapping": {
                "world_size": world,
                "tp_size": tensor_parallel,
                "pp_size": pipeline_parallel,
                "moe_tp_size": tensor_parallel,
                "moe_ep_size": 1,
            },
            "quantization": {
                "quant_algo": QUANTIZATIONS[quantization],
                "kv_cache_quant_algo": kv_cache,
                "group_size": 128,
            },
        },
        "build_config": {
            "max_input_len": 8192,
            "max_seq_len": 9216 + max_draft_len,
            "opt_batch_size": 8,
            "max_batch_size": 64,
            "max_beam_width": 1,
            "max_num_tokens": 8192,
            "opt_num_tokens": 64,
            "kv_cache_type": "PAGED",
            "gather_context_logits": False,
            "gather_generation_logits": False,
            "speculative_decoding_mode": 2 if max_draft_len else 1,
            "max_draft_len": max_draft_len,
            "strongly_typed": True,
            "plugin_config": {
                "gpt_attention_plugin": "auto",
                "context_fmha": True,
                "paged_kv_cache": True,
                "remove_input_padding": True,
                "tokens_per_block": 32,
                "use_paged_context_fmha": paged_context_fmha,
                "use_fp8_context_fmha": quantization == "fp8" and kv_cache == "FP8",
            },
        }
        | build,
    }


def make_engine(folder: Path, *, plan_bytes: int = 1024, **config: Any) -> Path:
    """Write config.json and the plan of each rank into a new folder; the folder."""
    folder.mkdir(parents=True)
    content = engine_config(**config)
    (folder / "config.json").write_text(json.dumps(content, indent=4))
    for rank in range(content["pretrained_config"]["mapping"]["world_size"]):
        (folder / f"rank{rank}.engine").write_bytes(bytes([rank % 256]) * plan_bytes)
    return folder
