"""Transformers with multi-head latent attention: DeepSeek V2, V3 and V3.2, Kimi K2, GLM 4.7 Flash, 5 and newer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.models.blocks import Block, LatentAttention, experts, latent_attention, norms, sparse_index
from pipeline.models.config_values import ConfigValues
from pipeline.models.families import vision
from pipeline.models.families.base import (
    LAYER_NORMS,
    Family,
    deepseek_experts,
    hidden_size,
    layer_kinds,
    next_layers,
    plain_dense,
)


def latent_sizes(values: ConfigValues) -> LatentAttention:
    """Sizes of latent attention by a config."""
    return LatentAttention(
        kv_rank=values.size("kv_lora_rank"),
        rope=values.size("qk_rope_head_dim"),
        nope=values.size("qk_nope_head_dim"),
        value=values.size("v_head_dim"),
        query_rank=values.size("q_lora_rank", default=0, least=0),
    )


def _mixer(values: ConfigValues) -> Block:
    bias = values.flag("attention_bias", False)
    return latent_attention(
        hidden_size(values), values.size("num_attention_heads"), latent_sizes(values), bias=bias
    )


def _layer(values: ConfigValues, index: int) -> Block:
    return _mixer(values) + deepseek_experts(values, index) + norms(hidden_size(values), *LAYER_NORMS)


def v2_layer(values: ConfigValues, index: int) -> Block:
    """DeepSeek V2, Mistral 4: the router has no score for each expert."""
    hidden = hidden_size(values)
    if index < values.size("first_k_dense_replace", default=0, least=0):
        feed = plain_dense(values, index)
    else:
        inner = values.size("moe_intermediate_size")
        shared = values.size("n_shared_experts", default=0, least=0)
        feed = experts(hidden, inner, values.size("n_routed_experts"), shared=shared * inner)
    return _mixer(values) + feed + norms(hidden, *LAYER_NORMS)


def _sparse(values: ConfigValues, index: int) -> Block:
    """With an indexer, except in layers that share that of an earlier one."""
    layer, kinds = _layer(values, index), layer_kinds(values, "indexer_types", ("full", "shared"))
    if kinds and index < len(kinds) and kinds[index] == "shared":
        return layer
    rank = values.size("q_lora_rank")
    return layer + sparse_index(
        hidden_size(values), rank, values.size("index_n_heads"), values.size("index_head_dim")
    )


_V3 = Family(_layer, "deepseek_v3", draft=next_layers(_layer))
_GLM = Family(_sparse, "glm_moe_dsa", draft=next_layers(_sparse, copies=False))

FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": Family(v2_layer, "deepseek_v2"),
    "Mistral4ForCausalLM": Family(v2_layer, "mistral4"),
    "DeepseekV3ForCausalLM": _V3,
    "DeepseekV32ForCausalLM": Family(_sparse, "deepseek_v32", draft=next_layers(_sparse)),
    "KimiK25ForConditionalGeneration": replace(_V3, vision=vision.kimi),
    "GlmMoeDsaForCausalLM": _GLM,
    "Glm4MoeLiteForCausalLM": replace(_V3, library="glm4_moe_lite"),
}
