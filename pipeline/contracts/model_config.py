"""A Hugging Face config.json, read for the sizes of `pipeline.contracts.models`.

Families whose configs leave things unsaid (which have biases, which norms, which layers see a window) are told apart by
the name of their class, as transformers does. What a model computes is not judged here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek V2, V3): a token leaves one compressed vector for all heads."""

    kv_rank: int  # kv_lora_rank
    rope: int  # qk_rope_head_dim
    nope: int  # qk_nope_head_dim
    value: int  # v_head_dim
    query_rank: int = 0  # q_lora_rank; 0: queries are not compressed


NEEDED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def dimensions(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    experts = _experts(config)
    inner = config.get("moe_intermediate_size") if experts else None
    return {
        "architecture": class_of(config),
        "hidden": hidden,
        "layers": int(config["num_hidden_layers"]),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "intermediate": int(inner or config["intermediate_size"]),
        "vocab": int(config["vocab_size"]),
        "max_positions": int(config["max_position_embeddings"]),
        "experts": experts,
        "experts_per_token": int(config.get("num_experts_per_tok") or 0) if experts else 0,
    }


def details(config: Mapping[str, Any]) -> dict[str, Any]:
    """Biases, norms and what else changes the number of weights or the size of the KV cache."""
    name, experts = class_of(config), _experts(config)
    bias = bool(config.get("attention_bias", False))
    gemma = name.startswith("Gemma")
    return {
        "tied": bool(config.get("tie_word_embeddings", gemma)),
        "qkv_bias": bias or name.startswith("Qwen2"),
        "output_bias": bias and not name.startswith("Qwen2"),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "qk_norm": name.startswith(("Qwen3", "Gemma3")),
        "layer_norms": 4 if name.startswith(("Gemma2", "Gemma3")) else 2,
        "latent": _latent(config),
        "windows": _windows(config),
        "shared_intermediate": _shared(config) if experts else 0,
        "shared_gate": bool(experts and config.get("shared_expert_intermediate_size")),
        "expert_bias": name.startswith("GptOss"),
        "sinks": name.startswith("GptOss"),
        "score_bias": name.startswith("DeepseekV3"),
        "dense_layers": int(config.get("first_k_dense_replace") or 0) if experts else 0,
        "dense_intermediate": int(config["intermediate_size"]) if experts else 0,
        "draft_vocab": int(config.get("draft_vocab_size") or 0),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        "stored": _stored(config),
    }


def class_of(config: object) -> str:
    """The class that a config.json names, the first if there are several: "LlamaForCausalLM"; "": none."""
    names = config.get("architectures") if isinstance(config, Mapping) else None
    return str(names[0]) if isinstance(names, list) and names else ""


def _experts(config: Mapping[str, Any]) -> int:
    counts = (config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    return int(next((count for count in counts if count), 0))


def _shared(config: Mapping[str, Any]) -> int:
    each = int(config.get("n_shared_experts") or 0) * int(config.get("moe_intermediate_size") or 0)
    return each or int(config.get("shared_expert_intermediate_size") or 0)


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        kv_rank=int(config["kv_lora_rank"]),
        rope=int(config["qk_rope_head_dim"]),
        nope=int(config["qk_nope_head_dim"]),
        value=int(config["v_head_dim"]),
        query_rank=int(config.get("q_lora_rank") or 0),
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of each layer: from `layer_types`, from a pattern (Gemma 3), from Qwen's `max_window_layers`, or one for all."""
    window, layers, name = (
        config.get("sliding_window"),
        int(config["num_hidden_layers"]),
        class_of(config),
    )
    qwen = name.startswith("Qwen")
    if not window or name.startswith("Llama") or (qwen and not config.get("use_sliding_window", False)):
        return ()
    pattern = config.get("sliding_window_pattern") or (2 if name.startswith("Gemma2") else None)
    if kinds := config.get("layer_types"):
        full = [kind == "full_attention" for kind in kinds]
    elif pattern:
        full = [(layer + 1) % int(pattern) == 0 for layer in range(layers)]
    else:
        full = [qwen and layer < int(config.get("max_window_layers", 28)) for layer in range(layers)]
    return tuple(0 if sees_all else int(window) for sees_all in full)


_PUBLISHED: Mapping[str, str] = {
    "FP8": "fp8",
    "NVFP4": "nvfp4",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
}


def _stored(config: Mapping[str, Any]) -> str:
    """The format of a checkpoint that is published quantized, or the method's own name; "none" where it is not."""
    settings = config.get("quantization_config") or {}
    method = str(settings.get("quant_method") or "")
    if method == "fp8":
        return "fp8_block" if settings.get("weight_block_size") else "fp8"
    if method == "awq" and settings.get("bits", 4) == 4:
        return "int4_awq"
    if method == "modelopt":
        algorithm = str(settings.get("quant_algo") or "none")
        return _PUBLISHED.get(algorithm, algorithm)
    return method or ("none" if not settings else "quantization_config without quant_method")


_NAMES: Mapping[str, str] = {
    "rope_theta": "theta",
    "rope_type": "kind",
    "type": "kind",
    "original_max_position_embeddings": "original_max_positions",
}


def rope(config: Mapping[str, Any]) -> Mapping[str, float | str]:
    """Rotary settings of either layout of config.json, under our names."""
    settings: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings.setdefault("rope_theta", config.get("rope_theta") or 10_000)
    plain = {_NAMES.get(name, name): value for name, value in settings.items()}
    kept = {name: value for name, value in plain.items() if isinstance(value, int | float | str)}
    return {"kind": "default", **kept}
