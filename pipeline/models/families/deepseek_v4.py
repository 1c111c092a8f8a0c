"""DeepSeek V4: each layer sees a window, and what lies before it as one entry for so many tokens (`compress_ratios`).

Keys and values are one vector of one head. Where entries stand for few tokens, an indexer chooses among them. Residual
streams are mixed (`hc_mult` of them), and the first layers choose experts by a token's number (`num_hash_layers`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.blocks import W123, Block, Cache, WeightTensor, experts, linear, norms, vector
from pipeline.models.config_values import ConfigValues
from pipeline.models.families.base import Family, hidden_layers, hidden_size

_INDEXED = 4  # tokens of an entry, where an indexer chooses


def _matrix(name: str, rows: int, columns: int) -> WeightTensor:
    """A matrix that keeps its precision."""
    return WeightTensor("attention", rows, columns, name=name)


def _compressor(name: str, hidden: int, size: int, ratio: int) -> tuple[WeightTensor, ...]:
    wide = size * (2 if ratio == _INDEXED else 1)
    return (
        _matrix(f"{name}.ape", ratio, wide),
        _matrix(f"{name}.wkv", wide, hidden),
        _matrix(f"{name}.wgate", wide, hidden),
        vector("norms", f"{name}.norm", size),
    )


def _attention(values: ConfigValues, ratio: int) -> Block:
    hidden, heads, head_dim = hidden_size(values), values.size("num_attention_heads"), values.size("head_dim")
    rank, groups, out_rank = values.size("q_lora_rank"), values.size("o_groups"), values.size("o_lora_rank")
    weights = [
        *linear("attention", "attn.wq_a", rank, hidden),
        vector("norms", "attn.q_norm", rank),
        *linear("attention", "attn.wq_b", heads * head_dim, rank, "rows"),
        *linear("attention", "attn.wkv", head_dim, hidden),
        vector("norms", "attn.kv_norm", head_dim),
        *linear("attention", "attn.wo_a", groups * out_rank, heads * head_dim // groups, "rows"),
        *linear("attention", "attn.wo_b", hidden, groups * out_rank, "columns"),
        vector("attention", "attn.attn_sink", heads, "rows"),
    ]
    caches = [Cache("sliding window", head_dim, window=values.size("sliding_window"), is_bounded=True)]
    if ratio:
        weights += _compressor("attn.compressor", hidden, head_dim, ratio)
        caches.append(Cache("compressed", head_dim, every=ratio))
    if ratio == _INDEXED:
        name, count, size = "attn.indexer", values.size("index_n_heads"), values.size("index_head_dim")
        weights += linear("attention", f"{name}.wq_b", count * size, rank, "rows")
        weights.append(_matrix(f"{name}.weights_proj", count, hidden))
        weights += _compressor(f"{name}.compressor", hidden, size, ratio)
        caches.append(Cache("sparse index", size, every=ratio, bytes_each=1 + 4 / 128))
    return Block(tuple(weights), tuple(caches))


def _mixing(values: ConfigValues, *names: str) -> Block:
    """Weights that mix the residual streams before and after a part of a layer."""
    streams, hidden = values.size("hc_mult", default=4), hidden_size(values)
    count = streams * (streams + 2)
    tensors: list[WeightTensor] = []
    for name in names:
        tensors += (_matrix(f"{name}_fn", count, streams * hidden), vector("norms", f"{name}_base", count))
        tensors.append(vector("norms", f"{name}_scale", 3))
    return Block(tuple(tensors))


def _layer(values: ConfigValues, index: int) -> Block:
    hidden, ratios = hidden_size(values), values.sizes("compress_ratios")
    if len(ratios) < hidden_layers(values):
        values.refuse("compress_ratios", "must say of each layer how many tokens an entry stands for")
        ratios = [0] * (index + 1)
    inner, count = values.size("moe_intermediate_size"), values.size("n_routed_experts")
    is_hashed = index < values.size("num_hash_layers", default=0, least=0)
    feed = experts(
        hidden, inner, count, name="ffn", projections=W123, score_bias=not is_hashed, score_name="gate.bias",
        shared=inner * values.size("n_shared_experts", default=0, least=0),
    )  # fmt: skip
    ratio = ratios[index] if index < len(ratios) else 0
    return (
        _attention(values, ratio)
        + feed
        + norms(hidden, "attn_norm", "ffn_norm")
        + _mixing(values, "hc_attn", "hc_ffn")
    )


def _outer(values: ConfigValues) -> Block:
    streams, hidden = values.size("hc_mult", default=4), hidden_size(values)
    return Block(
        (
            _matrix("hc_head_fn", streams, streams * hidden),
            vector("norms", "hc_head_base", streams),
            vector("norms", "hc_head_scale", 1),
        )
    )


def _draft(values: ConfigValues) -> Block:
    hidden, layers, block = hidden_size(values), hidden_layers(values), Block()
    for index in range(values.size("num_nextn_predict_layers", default=0, least=0, most=64)):
        part = Block((*linear("mtp", "e_proj", hidden, hidden), *linear("mtp", "h_proj", hidden, hidden)))
        part += norms(hidden, "enorm", "hnorm", "norm") + _layer(values, layers + index) + _outer(values)
        block += part.at(f"mtp.{index}.")
    return block


FAMILIES: Mapping[str, Family] = {
    "DeepseekV4ForCausalLM": Family(
        _layer, "deepseek_v4", draft=_draft, outer=_outer, head="head", embedding="embed"
    ),
}
