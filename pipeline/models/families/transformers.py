"""Transformers whose layers are attention with keys and values for each KV head, and a feed-forward or experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.models.blocks import (
    W123,
    Block,
    Cache,
    WeightTensor,
    attention,
    experts,
    feed_forward,
    linear,
    norms,
)
from pipeline.models.config_values import MAX_LAYERS, ConfigValues
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


def _mixtral_experts(values: ConfigValues, _index: int) -> Block:
    inner, count = values.size("intermediate_size"), values.size("num_local_experts")
    return experts(hidden_size(values), inner, count, name="block_sparse_moe", projections=W123)


def _mistral3(values: ConfigValues, index: int) -> Block:
    """Mistral with a tower: a dense decoder, or that of Mistral 4."""
    return (v2_layer if values.says("kv_lora_rank") else _MISTRAL.layer)(values, index)


def _minimax_experts(values: ConfigValues, _index: int) -> Block:
    inner, count = values.size("intermediate_size"), values.size("num_local_experts")
    return experts(
        hidden_size(values), inner, count, name="block_sparse_moe", projections=W123,
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
    hidden, block = hidden_size(values), Block()
    for index in range(values.size("num_nextn_predict_layers", default=0, least=0, most=64)):
        part = Block(linear("mtp", "input_proj", hidden, 2 * hidden))
        part += norms(hidden, "token_layernorm", "hidden_layernorm", "final_layernorm") + _QWEN2.layer(
            values, index
        )
        block += part.at(f"mtp_layers.{index}.")
    return block


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


def _glm4_moe(values: ConfigValues, index: int) -> Block:
    """GLM 4.5: norms over heads of queries and keys where `use_qk_norm` says so."""
    layer = _GLM4_MOE(values, index)
    if not values.flag("use_qk_norm", False):
        return layer
    head_dim = heads_of(values)[2]
    return layer + norms(head_dim, "self_attn.q_norm", "self_attn.k_norm")


_GLM45 = Family(_glm4_moe, "glm4_moe", draft=next_layers(_glm4_moe))

# Nemotron-NAS (DeciLM): a Llama of which each layer was searched for, by `block_configs`. A layer may lack attention or
# feed-forward, or have one matrix in its place, and chooses its KV heads and the size of its feed-forward by itself. As
# in NVIDIA/TensorRT-LLM tensorrt_llm/_torch/models/modeling_nemotron_nas.py (file index id 3513435522), which follows
# modeling_decilm.py of the checkpoints.

_NAS_MULTIPLE = 256  # to which the sizes of feed-forwards are rounded up


def _nas_layers(values: ConfigValues) -> int:
    count, blocks = values.size("num_hidden_layers", most=MAX_LAYERS), values.inners("block_configs")
    if len(blocks) != count:
        values.refuse("block_configs", f"must describe each of {count} layers")
        return 0
    return count


def _nas_layer(values: ConfigValues, index: int) -> Block:
    hidden = hidden_size(values)
    block = values.inners("block_configs")[index]
    return _nas_attention(values, block.inner("attention"), hidden) + _nas_feed_forward(
        values, block.inner("ffn"), hidden
    )


def _nas_attention(values: ConfigValues, config: ConfigValues, hidden: int) -> Block:
    if config.flag("no_op", False):
        return Block()
    norm = norms(hidden, "input_layernorm")
    if config.flag("replace_with_linear", False):
        return norm + Block(linear("attention", "self_attn.linear_attn", hidden, hidden))
    heads = values.size("num_attention_heads")
    each = config.size("n_heads_in_group", default=0, least=0)
    kv_heads = heads // each if each else config.size("num_key_value_heads")
    window = config.size("window_length", default=0, least=0)
    bias = values.flag("attention_bias", False)
    head_dim = values.size("head_dim", default=max(1, hidden // heads))
    return norm + attention(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, window=window)


def _nas_feed_forward(values: ConfigValues, config: ConfigValues, hidden: int) -> Block:
    if config.flag("no_op", False):
        return Block()
    norm = norms(hidden, "post_attention_layernorm")
    if config.flag("replace_with_linear", False):
        return norm + Block(linear("mlp", "mlp.linear_mlp", hidden, hidden))
    if config.says("intermediate_size"):
        inner = config.size("intermediate_size")
    else:
        inner = -(-int(2 * config.number("ffn_mult") * hidden / 3) // _NAS_MULTIPLE) * _NAS_MULTIPLE
    return norm + feed_forward(hidden, inner, bias=values.flag("mlp_bias", False))


# MiniMax M3: attention that sees everything, or blocks of tokens that an indexer chooses; dense layers, then experts.
# The indexer keeps one key of its own for each token (`sparse_attention_config`, or `index_*` as transformers has it).

_M3_SPARSE = "minimax_m3_sparse"


def _is_sparse(values: ConfigValues, config: ConfigValues, index: int) -> bool:
    kinds = layer_kinds(values, known=("full_attention", _M3_SPARSE))
    often = config.sizes("sparse_attention_freq")
    return kinds[index] == _M3_SPARSE if kinds else bool(often[index : index + 1] == [1])


def _has_experts(values: ConfigValues, index: int) -> bool:
    kinds = layer_kinds(values, "mlp_layer_types", ("dense", "sparse"))
    if kinds or not values.says("moe_layer_freq"):
        return not kinds or kinds[index] == "sparse"
    return values.sizes("moe_layer_freq")[index : index + 1] == [1]


def _minimax_m3(values: ConfigValues, index: int) -> Block:
    hidden, config = hidden_size(values), values.inner("sparse_attention_config")
    layer = attention(hidden, *heads_of(values), norm="head") + norms(hidden, *LAYER_NORMS)
    heads = config.size("sparse_num_index_heads", default=values.size("index_n_heads"))
    size = config.size("sparse_index_dim", default=values.size("index_head_dim"))
    if _is_sparse(values, config, index):
        name = "self_attn.index"
        queries = linear("attention", f"{name}_q_proj", heads * size, hidden)
        layer += Block(
            (*queries, *linear("attention", f"{name}_k_proj", size, hidden)), (Cache("sparse index", size),)
        )
        layer += norms(size, f"{name}_q_norm", f"{name}_k_norm")
    if not _has_experts(values, index):
        return layer + feed_forward(hidden, values.size("dense_intermediate_size"))
    shared = values.size("shared_intermediate_size", default=0, least=0)
    return layer + experts(
        hidden, values.size("intermediate_size"), values.size("num_local_experts"), name="block_sparse_moe",
        projections=W123, score_bias=True, score_name="e_score_correction_bias",
        shared=shared,
    )  # fmt: skip


_M3 = Family(_minimax_m3, "minimax_m3_vl_text")

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
    "DeciLMForCausalLM": Family(_nas_layer, layers=_nas_layers),
    "MiniMaxM3SparseForCausalLM": _M3,
    "MiniMaxM3SparseForConditionalGeneration": replace(_M3, vision=vision.minimax),
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
