"""MiniMax M3: attention that sees everything, or blocks of tokens that an indexer chooses; dense layers, then experts.

The indexer keeps one key of its own for each token (`sparse_attention_config`, or `index_*` as transformers writes it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.models.blocks import Block, Cache, attention, experts, feed_forward, linear, norms
from pipeline.models.config_values import ConfigValues
from pipeline.models.families import vision
from pipeline.models.families.base import LAYER_NORMS, Family, heads_of, hidden_size, layer_kinds

_SPARSE = "minimax_m3_sparse"


def _is_sparse(values: ConfigValues, told: ConfigValues, index: int) -> bool:
    kinds = layer_kinds(values, known=("full_attention", _SPARSE))
    often = told.sizes("sparse_attention_freq")
    return kinds[index] == _SPARSE if kinds else bool(often[index : index + 1] == [1])


def _has_experts(values: ConfigValues, index: int) -> bool:
    kinds = layer_kinds(values, "mlp_layer_types", ("dense", "sparse"))
    if kinds or not values.says("moe_layer_freq"):
        return not kinds or kinds[index] == "sparse"
    return values.sizes("moe_layer_freq")[index : index + 1] == [1]


def _layer(values: ConfigValues, index: int) -> Block:
    hidden, told = hidden_size(values), values.inner("sparse_attention_config")
    found = attention(hidden, *heads_of(values), norm="head") + norms(hidden, *LAYER_NORMS)
    heads = told.size("sparse_num_index_heads", default=values.size("index_n_heads"))
    size = told.size("sparse_index_dim", default=values.size("index_head_dim"))
    if _is_sparse(values, told, index):
        name = "self_attn.index"
        queries = linear("attention", f"{name}_q_proj", heads * size, hidden)
        found += Block(
            (*queries, *linear("attention", f"{name}_k_proj", size, hidden)), (Cache("sparse index", size),)
        )
        found += norms(size, f"{name}_q_norm", f"{name}_k_norm")
    if not _has_experts(values, index):
        return found + feed_forward(hidden, values.size("dense_intermediate_size"))
    shared = values.size("shared_intermediate_size", default=0, least=0)
    return found + experts(
        hidden, values.size("intermediate_size"), values.size("num_local_experts"), name="block_sparse_moe",
        projections=("w1", "w3", "w2"), score_bias=True, score_name="e_score_correction_bias",
        shared=shared,
    )  # fmt: skip


_M3 = Family(_layer, "minimax_m3_vl_text")

FAMILIES: Mapping[str, Family] = {
    "MiniMaxM3SparseForCausalLM": _M3,
    "MiniMaxM3SparseForConditionalGeneration": replace(_M3, vision=vision.minimax),
}
