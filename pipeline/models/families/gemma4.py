"""Gemma 4: layers that see a window and layers that see everything differ in heads; experts lie beside a feed-forward.

Layers at the end may read the keys and values of earlier ones (`num_kv_shared_layers`), and small models bring an
embedding for each layer (`hidden_size_per_layer_input`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.blocks import Block, WeightTensor, attention, feed_forward, linear, norms, vector
from pipeline.models.config_values import ConfigValues
from pipeline.models.families import vision
from pipeline.models.families.base import Family, heads_of, hidden_layers, hidden_size, layer_kinds

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _layer(values: ConfigValues, index: int) -> Block:
    hidden, kinds = hidden_size(values), layer_kinds(values)
    is_windowed = kinds[index] == "sliding_attention" if kinds else (index + 1) % 6 != 0
    shared = values.size("num_kv_shared_layers", default=0, least=0)
    is_shared = index >= hidden_layers(values) - shared
    inner = values.size("intermediate_size") * (
        2 if is_shared and values.flag("use_double_wide_mlp", False) else 1
    )
    layer = _mixer(values, hidden, is_windowed=is_windowed)
    if is_shared:
        layer = Block(tuple(weight for weight in layer.weights if not weight.name.startswith(_PAIRS)))
    layer += feed_forward(hidden, inner) + norms(hidden, *_NORMS)
    if values.flag("enable_moe_block", False):
        layer += _experts(values, hidden)
    if each := values.size("hidden_size_per_layer_input", default=0, least=0):
        layer += Block(
            (
                *linear("mlp", "per_layer_input_gate", each, hidden),
                *linear("mlp", "per_layer_projection", hidden, each),
            )
        )
        layer += norms(hidden, "post_per_layer_input_norm")
    return layer + Block((vector("norms", "layer_scalar", 1),))


_PAIRS = ("self_attn.k_", "self_attn.v_")


def _mixer(values: ConfigValues, hidden: int, *, is_windowed: bool) -> Block:
    heads, kv_heads, head_dim = heads_of(values)
    bias = values.flag("attention_bias", False)
    if is_windowed:
        window = values.size("sliding_window")
        return attention(
            hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norm="head", window=window
        )
    alike = values.flag("attention_k_eq_v", False)
    kv_heads = values.size("num_global_key_value_heads", default=kv_heads) if alike else kv_heads
    head_dim = values.size("global_head_dim", default=head_dim)
    return attention(
        hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, norm="head", keys_are_values=alike
    )


def _experts(values: ConfigValues, hidden: int) -> Block:
    count = values.size("num_experts")
    routed = feed_forward(
        hidden, values.size("moe_intermediate_size"), name="experts.0", kind="experts", copies=count
    )
    router = (
        WeightTensor("experts", count, hidden, name="router.proj"),
        vector("experts", "router.scale", hidden),
        vector("experts", "router.per_expert_scale", count),
    )
    more = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    return Block(router) + routed + norms(hidden, *more)


def _outer(values: ConfigValues) -> Block:
    each = values.size("hidden_size_per_layer_input", default=0, least=0)
    if not each:
        return Block()
    rows = hidden_layers(values) * each
    vocab = values.size("vocab_size_per_layer_input", "vocab_size")
    weights = (
        WeightTensor("embedding", vocab, rows, name="embed_tokens_per_layer"),
        *linear("mlp", "per_layer_model_projection", rows, hidden_size(values)),
    )
    return Block(weights) + norms(each, "per_layer_projection_norm")


_GEMMA4 = Family(_layer, "gemma4_text", tied=True, vision=vision.gemma4, outer=_outer)

FAMILIES: Mapping[str, Family] = {
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4ForCausalLM": Family(_layer, "gemma4_text", tied=True, outer=_outer),
}
