"""Transformers whose layers are attention with keys and values for each KV head, and a feed-forward or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.models.blocks import Block, WeightTensor, attention, experts, feed_forward, linear, norms
from pipeline.models.config_values import ConfigValues
from pipeline.models.families import vision
from pipeline.models.families.base import (
    LAYER_NORMS,
    Family,
    decoder_layer,
    deepseek_experts,
    heads_of,
    hidden_layers,
    hidden_size,
    layer_kinds,
    next_layers,
    one_window,
    plain_dense,
    qwen_experts,
    qwen_window,
    window_pattern,
)
from pipeline.models.families.latent import v2_layer

_FOUR_NORMS = (*LAYER_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_AFTER_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_W = ("w1", "w3", "w2")


def _mixtral_experts(values: ConfigValues, _index: int) -> Block:
    inner, count = values.size("intermediate_size"), values.size("num_local_experts")
    return experts(hidden_size(values), inner, count, name="block_sparse_moe", projections=_W)


def _mistral3(values: ConfigValues, index: int) -> Block:
    """Mistral with a tower: a dense decoder, or that of Mistral 4."""
    return (v2_layer if values.says("kv_lora_rank") else _MISTRAL.layer)(values, index)


def _minimax_experts(values: ConfigValues, _index: int) -> Block:
    inner, count = values.size("intermediate_size"), values.size("num_local_experts")
    return experts(
        hidden_size(values), inner, count, name="block_sparse_moe", projections=_W,
        score_bias=values.flag("use_routing_bias", True), score_name="e_score_correction_bias",
    )  # fmt: skip


def _gpt_oss_experts(values: ConfigValues, _index: int) -> Block:
    inner, count = values.size("intermediate_size"), values.size("num_local_experts")
    return experts(hidden_size(values), inner, count, router="router", router_bias=True, bias=True)


def _llama4(values: ConfigValues, index: int) -> Block:
    hidden = hidden_size(values)
    kinds = layer_kinds(values, known=("chunked_attention", "full_attention"))
    step = values.size("interleave_moe_layer_step", default=1)
    listed = values.sizes("moe_layers")
    rope = values.sizes("no_rope_layers")
    every = values.size("no_rope_layer_interval", default=4)
    if kinds:
        is_chunked = kinds[index] == "chunked_attention"
    else:
        is_chunked = bool(rope[index]) if index < len(rope) else (index + 1) % every != 0
    chunk = values.size("attention_chunk_size", default=0, least=0) if is_chunked else 0
    bias = values.flag("attention_bias", False)
    inner = values.size("intermediate_size")
    if index in listed if values.get("moe_layers") is not None else (index + 1) % step == 0:
        feed = experts(
            hidden, inner, values.size("num_local_experts"), name="feed_forward", router="router",
            shared=inner, shared_name="shared_expert",
        )  # fmt: skip
    else:
        feed = feed_forward(hidden, values.size("intermediate_size_mlp"), name="feed_forward")
    mixer = attention(hidden, *heads_of(values), bias=bias, output_bias=bias, chunk=chunk)
    return mixer + feed + norms(hidden, *LAYER_NORMS)


def _mimo_v2(values: ConfigValues, index: int) -> Block:
    """MiMo-V2-Flash: heads of values are smaller than those of keys, and windowed layers have KV heads of their own."""
    hidden, kinds, pattern = hidden_size(values), layer_kinds(values), values.sizes("hybrid_layer_pattern")
    windowed = kinds[index] == "sliding_attention" if kinds else bool(pattern[index : index + 1] == [1])
    if not kinds and len(pattern) != hidden_layers(values):
        values.refuse("hybrid_layer_pattern", "must say of each layer whether it sees a window")
    place = "swa_" if windowed else ""
    heads, kv_heads, head_dim = heads_of(values)
    if windowed:
        heads = values.size("swa_num_attention_heads", default=heads)
        kv_heads = values.size("swa_num_key_value_heads", default=2 * kv_heads)
        head_dim = values.size("swa_head_dim", default=head_dim)
    value_dim = values.size(f"{place}v_head_dim", "v_head_dim", default=head_dim)
    sinks = values.flag(
        "add_swa_attention_sink_bias" if windowed else "add_full_attention_sink_bias", windowed
    )
    window = values.size("sliding_window", default=0, least=0) if windowed else 0
    mixer = attention(hidden, heads, kv_heads, head_dim, value_dim=value_dim, sinks=sinks, window=window)
    feeds, listed = layer_kinds(values, "mlp_layer_types", ("dense", "sparse")), values.get("moe_layer_freq")
    is_sparse = feeds[index] == "sparse" if feeds else index > 0
    if isinstance(listed, list):
        is_sparse = values.sizes("moe_layer_freq")[index : index + 1] == [1]
    inner = values.size("moe_intermediate_size")
    feed = (
        experts(hidden, inner, values.size("n_routed_experts"), score_bias=True)
        if is_sparse
        else plain_dense(values, index)
    )
    return mixer + feed + norms(hidden, *LAYER_NORMS)


def _mimo_draft(values: ConfigValues) -> Block:
    """MiMo-7B: whole layers, each of which joins a token's embedding to the last hidden state."""
    hidden, found = hidden_size(values), Block()
    for index in range(values.size("num_nextn_predict_layers", default=0, least=0, most=64)):
        part = Block(linear("mtp", "input_proj", hidden, 2 * hidden))
        part += norms(hidden, "token_layernorm", "hidden_layernorm", "final_layernorm") + _QWEN2.layer(
            values, index
        )
        found += part.at(f"mtp_layers.{index}.")
    return found


def _eagle3(values: ConfigValues, index: int) -> Block:
    """Eagle-3 head: a layer that reads a token's embedding beside the joined hidden states of three of its target's."""
    hidden = hidden_size(values)
    mixer = attention(hidden, *heads_of(values), inputs=2 * hidden)
    joined = WeightTensor("attention", hidden, 3 * hidden, name="fc")
    return mixer + plain_dense(values, index) + norms(hidden, *LAYER_NORMS, "hidden_norm") + Block((joined,))


_LLAMA = Family(decoder_layer(), "llama")
_MISTRAL = Family(
    decoder_layer(feed=plain_dense, window=one_window, bias=False, output_bias=False), "mistral"
)
_QWEN2 = Family(decoder_layer(feed=plain_dense, window=qwen_window, bias=True, output_bias=False), "qwen2")
_QWEN3 = Family(decoder_layer(feed=plain_dense, window=qwen_window, norm="head"), "qwen3")
_QWEN3_MOE = Family(decoder_layer(feed=qwen_experts, window=qwen_window, norm="head"), "qwen3_moe")
_GEMMA2 = Family(
    decoder_layer(feed=plain_dense, window=window_pattern(2), layer_norms=_FOUR_NORMS), "gemma2", tied=True
)
_GEMMA3 = Family(
    decoder_layer(feed=plain_dense, window=window_pattern(6), norm="head", layer_norms=_FOUR_NORMS),
    "gemma3_text", tied=True,
)  # fmt: skip
_GLM4_MOE = decoder_layer(feed=deepseek_experts, output_bias=False)
_GLM45 = Family(_GLM4_MOE, "glm4_moe", draft=next_layers(_GLM4_MOE))


def _glm4_moe(values: ConfigValues, index: int) -> Block:
    """GLM 4.5: norms over heads of queries and keys where `use_qk_norm` says so."""
    found = _GLM4_MOE(values, index)
    if not values.flag("use_qk_norm", False):
        return found
    head_dim = heads_of(values)[2]
    return found + norms(head_dim, "self_attn.q_norm", "self_attn.k_norm")


_GLM45 = replace(_GLM45, layer=_glm4_moe, draft=next_layers(_glm4_moe))

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "LlamaForCausalLMEagle3": Family(_eagle3, embeds=False),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, layer=_mistral3, vision=vision.pixtral),
    "Ministral3ForCausalLM": replace(_MISTRAL, library="ministral3"),
    "MixtralForCausalLM": Family(
        decoder_layer(feed=_mixtral_experts, window=one_window, bias=False, output_bias=False), "mixtral"
    ),
    "Phi3ForCausalLM": replace(_MISTRAL, library="phi3"),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2VLForConditionalGeneration": replace(_QWEN2, library="qwen2_vl_text", vision=vision.qwen2_vl),
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN2, library="qwen2_5_vl_text", vision=vision.qwen2_5_vl),
    "Qwen2MoeForCausalLM": Family(
        decoder_layer(feed=qwen_experts, window=qwen_window, bias=True, output_bias=False), "qwen2_moe"
    ),
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3VLForConditionalGeneration": replace(_QWEN3, library="qwen3_vl_text", vision=vision.qwen3_vl),
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Qwen3VLMoeForConditionalGeneration": replace(
        _QWEN3_MOE, library="qwen3_vl_moe_text", vision=vision.qwen3_vl
    ),
    "MiMoForCausalLM": replace(_QWEN2, library="", draft=_mimo_draft),
    "MiMoV2FlashForCausalLM": Family(_mimo_v2, "mimo_v2_flash"),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, vision=vision.gemma3),
    "GptOssForCausalLM": Family(
        decoder_layer(feed=_gpt_oss_experts, window=window_pattern(2), bias=True, output_bias=True, sinks=True),
        "gpt_oss",
    ),
    "MiniMaxM2ForCausalLM": Family(
        decoder_layer(feed=_minimax_experts, bias=False, output_bias=False, norm="all"), "minimax_m2"
    ),
    "Glm4MoeForCausalLM": _GLM45,
    "Llama4ForCausalLM": Family(_llama4, "llama4_text"),
    "Llama4ForConditionalGeneration": Family(_llama4, "llama4_text", vision=vision.llama4),
    "SeedOssForCausalLM": Family(decoder_layer(bias=True, output_bias=False), "seed_oss"),
    "SmolLM3ForCausalLM": Family(decoder_layer(), "smollm3", tied=True),
    "Olmo3ForCausalLM": Family(
        decoder_layer(feed=plain_dense, window=window_pattern(4), norm="all", layer_norms=_AFTER_NORMS), "olmo3"
    ),
}  # fmt: skip
