"""config.json of a TensorRT-LLM checkpoint: what it says of the model, and of how the model is divided.

Keys and values are those of ModelOpt's export and of TensorRT-LLM's own converters, which add experts (`moe`,
models/llama/config.py), Phi-3, and what QWenConfig has no default for. `rank_config` writes the whole file where we
divide a checkpoint; of ModelOpt's export, `describe` replaces what that loses or gets wrong.
"""

from __future__ import annotations

from typing import Any

from pipeline import __version__
from pipeline.models import Architecture, CheckpointQuantization, Format
from pipeline.plan.parallelism import Parallelism

SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16"}
# What ModelOpt's export calls the families.
MODEL_TYPES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "phi3": "phi3",
}
ROPES = ("default", "linear", "llama3")  # kinds of rotary embedding that are converted
_RENORMALIZE = 1  # MoeConfig.ExpertScaleNormalizationMode: the chosen experts' shares sum to 1
_QWEN_SEQ_LENGTH = (
    8192  # what upstream's converter writes (models/qwen/config.py); read with use_logn_attn only
)


def stored_dtype(model: Architecture) -> str:
    """TensorRT-LLM computes in 16 bits: a float32 source is stored as float16."""
    return "bfloat16" if model.dtype == "bfloat16" else "float16"


def rank_config(
    model: Architecture, sizes: Parallelism, quantization: CheckpointQuantization | None = None
) -> dict[str, Any]:
    """The whole file, which is the same for all ranks."""
    return {
        "producer": {"name": "pipeline", "version": __version__},
        **describe(model),
        "dtype": stored_dtype(model),
        "logits_dtype": "float32",
        "vocab_size": model.vocab,
        "mapping": _mapping(sizes, with_experts=bool(model.experts)),
        "quantization": _quantization(model, quantization or CheckpointQuantization()),
    }


def describe(model: Architecture) -> dict[str, Any]:
    """Return what the file says of the model, whatever its format and however it is divided.

    `hidden_act`: a gated feed-forward is implied by "silu" for Llama and Qwen; experts and Phi-3 say "swiglu"
    (models/llama/config.py, models/phi3/config.py).

    Returns:
        Keys and values of config.json; `rank_config` adds the rest of the file.
    """
    config: dict[str, Any] = {
        "architecture": model.class_name,
        "model_type": MODEL_TYPES[model.family],
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_size": model.hidden,
        "head_size": model.head_dim,
        "intermediate_size": model.intermediate,
        "norm_epsilon": model.norm_epsilon,
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
        "rotary_base": model.rope.theta,
        "rotary_scaling": _rotary_scaling(model),
        "attn_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        "qk_layernorm": model.qk_norm,
    }
    if MODEL_TYPES[model.family] == "qwen":
        config |= {"qwen_type": model.family, "seq_length": _QWEN_SEQ_LENGTH}
    if model.experts:
        config["moe"] = {
            "num_experts": model.experts,
            "top_k": model.experts_per_token,
            "normalization_mode": _RENORMALIZE,
        }
    return config


def _rotary_scaling(model: Architecture) -> dict[str, Any] | None:
    """As TensorRT-LLM reads it: `type`, or `rope_type` in newer releases; it does not know the type "default"."""
    rope = model.rope
    if rope.kind == "default":
        return None
    return {"type": rope.kind, "rope_type": rope.kind, **(rope.scaling or {})}


def _mapping(sizes: Parallelism, *, with_experts: bool) -> dict[str, int]:
    mapping = {"world_size": sizes.world, "tp_size": sizes.tensor, "pp_size": sizes.pipeline}
    if with_experts:
        mapping |= {"moe_tp_size": sizes.tensor // sizes.expert, "moe_ep_size": sizes.expert}
    return mapping


def _quantization(model: Architecture, quantization: CheckpointQuantization) -> dict[str, Any]:
    """Exclusions must be complete: the patterns replace TensorRT-LLM's own, which spare router and head
    (quantization/quantize.py).
    """
    if quantization.format is Format.NONE:
        return {"quant_algo": None, "kv_cache_quant_algo": None}
    return {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": quantization.kv_cache,
        "exclude_modules": ["lm_head", *(["*router"] if model.experts else [])],
    }
