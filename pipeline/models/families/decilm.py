"""Nemotron-NAS (`DeciLMForCausalLM`): a Llama of which each layer was searched for, by `block_configs`.

A layer may lack attention or feed-forward, or have one matrix in its place, and chooses its KV heads and the size of
its feed-forward by itself. As in NVIDIA/TensorRT-LLM tensorrt_llm/_torch/models/modeling_nemotron_nas.py (file index id
3513435522), which follows modeling_decilm.py of the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.blocks import Block, attention, feed_forward, linear, norms
from pipeline.models.config_values import MAX_LAYERS, ConfigValues
from pipeline.models.families.base import Family, hidden_size

_MULTIPLE = 256  # to which the sizes of feed-forwards are rounded up


def _layers(values: ConfigValues) -> int:
    count, found = values.size("num_hidden_layers", most=MAX_LAYERS), values.inners("block_configs")
    if len(found) != count:
        values.refuse("block_configs", f"must describe each of {count} layers")
        return 0
    return count


def _layer(values: ConfigValues, index: int) -> Block:
    hidden = hidden_size(values)
    block = values.inners("block_configs")[index]
    return _attention(values, block.inner("attention"), hidden) + _feed_forward(
        values, block.inner("ffn"), hidden
    )


def _attention(values: ConfigValues, told: ConfigValues, hidden: int) -> Block:
    if told.flag("no_op", False):
        return Block()
    norm = norms(hidden, "input_layernorm")
    if told.flag("replace_with_linear", False):
        return norm + Block(linear("attention", "self_attn.linear_attn", hidden, hidden))
    heads = values.size("num_attention_heads")
    each = told.size("n_heads_in_group", default=0, least=0)
    kv_heads = heads // each if each else told.size("num_key_value_heads")
    window = told.size("window_length", default=0, least=0)
    bias = values.flag("attention_bias", False)
    head_dim = values.size("head_dim", default=max(1, hidden // heads))
    return norm + attention(hidden, heads, kv_heads, head_dim, bias=bias, output_bias=bias, window=window)


def _feed_forward(values: ConfigValues, told: ConfigValues, hidden: int) -> Block:
    if told.flag("no_op", False):
        return Block()
    norm = norms(hidden, "post_attention_layernorm")
    if told.flag("replace_with_linear", False):
        return norm + Block(linear("mlp", "mlp.linear_mlp", hidden, hidden))
    if told.says("intermediate_size"):
        inner = told.size("intermediate_size")
    else:
        inner = -(-int(2 * told.number("ffn_mult") * hidden / 3) // _MULTIPLE) * _MULTIPLE
    return norm + feed_forward(hidden, inner, bias=values.flag("mlp_bias", False))


FAMILIES: Mapping[str, Family] = {"DeciLMForCausalLM": Family(_layer, layers=_layers)}
