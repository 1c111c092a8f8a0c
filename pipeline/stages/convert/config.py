"""config.json of an unquantized TensorRT-LLM checkpoint.

Keys and values are those that ModelOpt's export writes after its traps have been repaired (see stages.calibrate), with
what TensorRT-LLM's own converters add for experts (`moe`, models/llama/config.py) and Phi-3.
"""

from __future__ import annotations

from typing import Any

from pipeline import __version__
from pipeline.checkpoint import Architecture, Format, Quantization
from pipeline.planning.parallelism import Parallelism

DTYPES = {"bfloat16": "BF16", "float16": "F16"}
_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "phi3": "phi3",
}
_RENORMALIZE = 1  # MoeConfig.ExpertScaleNormalizationMode: the chosen experts' shares sum to 1


def stored_dtype(model: Architecture) -> str:
    """TensorRT-LLM computes in 16 bits: a float32 source is stored as float16."""
    return "bfloat16" if model.dtype == "bfloat16" else "float16"


def rank_config(
    model: Architecture, sizes: Parallelism, quantization: Quantization | None = None
) -> dict[str, Any]:
    """The same for all ranks.

    `hidden_act`: a gated feed-forward is implied by "silu" for Llama and Qwen; experts and Phi-3 say "swiglu"
    (models/llama/config.py, models/phi3/config.py).
    """
    rope = model.rope
    scaling = (
        None
        if rope.kind == "default"
        else {"type": rope.kind, "rope_type": rope.kind, **(rope.scaling or {})}
    )
    config: dict[str, Any] = {
        "producer": {"name": "pipeline", "version": __version__},
        "architecture": model.class_name,
        "dtype": stored_dtype(model),
        "logits_dtype": "float32",
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_size": model.hidden,
        "head_size": model.head_dim,
        "intermediate_size": model.intermediate,
        "norm_epsilon": model.norm_epsilon,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_positions,
        "position_embedding_type": "rope_gpt_neox",
        "hidden_act": "swiglu" if model.fused or model.experts else "silu",
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "tie_word_embeddings": model.tied,
        "residual_mlp": False,
        "bias": False,
        "rotary_pct": 1.0,
        "rotary_base": rope.theta,
        "rotary_scaling": scaling,
        "attn_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "qk_layernorm": model.qk_norm,
        "model_type": _MODEL_TYPES[model.family],
        "mapping": _mapping(sizes, with_experts=bool(model.experts)),
        "quantization": _quantization(model, quantization or Quantization()),
    }
    if model.family.startswith("qwen"):
        config["qwen_type"] = model.family
    if model.experts:
        config["moe"] = {
            "num_experts": model.experts,
            "top_k": model.experts_per_token,
            "normalization_mode": _RENORMALIZE,
        }
    return config


def _mapping(sizes: Parallelism, *, with_experts: bool) -> dict[str, int]:
    mapping = {"world_size": sizes.world, "tp_size": sizes.tensor, "pp_size": sizes.pipeline}
    if with_experts:
        mapping |= {"moe_tp_size": sizes.tensor // sizes.expert, "moe_ep_size": sizes.expert}
    return mapping


def _quantization(model: Architecture, quantization: Quantization) -> dict[str, Any]:
    """What is excluded must be said in full: the patterns replace TensorRT-LLM's own, which spare router and head
    (quantization/quantize.py).
    """
    if quantization.format is Format.NONE:
        return {"quant_algo": None, "kv_cache_quant_algo": None}
    return {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": quantization.kv_cache,
        "exclude_modules": ["lm_head", *(["*router"] if model.experts else [])],
    }
