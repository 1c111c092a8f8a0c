"""Decoders of which most layers are linear attention with a fixed state: Qwen3-Next, Qwen3.5, Kimi Linear and K3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from pipeline.models.blocks import (
    W123,
    Block,
    Cache,
    WeightTensor,
    attention,
    delta_net,
    experts,
    latent_attention,
    linear,
    norms,
    vector,
)
from pipeline.models.config_values import ConfigValues
from pipeline.models.families import vision
from pipeline.models.families.base import (
    LAYER_NORMS,
    Family,
    LayerOf,
    heads_of,
    hidden_layers,
    hidden_size,
    layer_kinds,
    plain_dense,
    qwen_experts,
)
from pipeline.models.families.latent import latent_sizes


def _qwen_linear(values: ConfigValues, *, joined: bool) -> Block:
    key_heads, value_heads = values.size("linear_num_key_heads"), values.size("linear_num_value_heads")
    key_dim, value_dim = values.size("linear_key_head_dim"), values.size("linear_value_head_dim")
    keys, inner = key_heads * key_dim, value_heads * value_dim
    inputs: Iterable[tuple[str, int, bool]] = (
        ("in_proj_qkv", 2 * keys + inner, True), ("in_proj_z", inner, True),
        ("in_proj_b", value_heads, False), ("in_proj_a", value_heads, False),
    )  # fmt: skip
    if joined:
        inputs = (("in_proj_qkvz", 2 * keys + 2 * inner, True), ("in_proj_ba", 2 * value_heads, False))
    return delta_net(
        hidden_size(values), key_heads, value_heads, key_dim, value_dim,
        values.size("linear_conv_kernel_dim"), inputs=inputs,
        state_dtype=values.choice("mamba_ssm_dtype", "float32", ("float32", "bfloat16", "float16")),
    )  # fmt: skip


def _full(values: ConfigValues, feed: LayerOf, index: int) -> Block:
    hidden = hidden_size(values)
    mixer = attention(hidden, *heads_of(values), norm="head", gate=values.flag("attn_output_gate", True))
    return mixer + feed(values, index) + norms(hidden, *LAYER_NORMS)


def _qwen(feed: LayerOf, *, joined: bool = False) -> LayerOf:
    """Linear attention in all but every fourth layer (`full_attention_interval`)."""

    def layer(values: ConfigValues, index: int) -> Block:
        kinds = layer_kinds(values, known=("linear_attention", "full_attention"))
        every = values.size("full_attention_interval", default=4)
        is_full = kinds[index] == "full_attention" if kinds else (index + 1) % every == 0
        if is_full:
            return _full(values, feed, index)
        hidden = hidden_size(values)
        return _qwen_linear(values, joined=joined) + feed(values, index) + norms(hidden, *LAYER_NORMS)

    return layer


def _qwen_draft(feed: LayerOf, key: str, count: int = 0) -> Callable[[ConfigValues], Block]:
    """Whole layers of full attention, behind one matrix that joins embedding and hidden state."""

    def draft(values: ConfigValues) -> Block:
        hidden, layers = hidden_size(values), values.size(key, default=count, least=0, most=64)
        if not layers:
            return Block()
        block = Block((WeightTensor("mtp", hidden, 2 * hidden, name="fc"),))
        block += norms(hidden, "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        for index in range(layers):
            block += _full(values, feed, hidden_layers(values) - 1).at(f"layers.{index}.")
        return block.at("mtp.")

    return draft


def _kimi(values: ConfigValues, index: int) -> Block:
    """Kimi Linear and K3: the delta rule with a gate for each channel; every few layers latent attention.

    As NVIDIA/TensorRT-LLM's modeling_kimi_k3 has it, which says how many bytes a rank reads of it (file index id
    57357616009).
    """
    hidden, config = hidden_size(values), values.inner("linear_attn_config")
    full, delta = config.sizes("full_attn_layers"), config.sizes("kda_layers")
    if set(full) | set(delta) != set(range(1, hidden_layers(values) + 1)):
        values.refuse(
            "linear_attn_config", "must say of each layer, from 1, whether it is linear or full attention"
        )
    layer = norms(hidden, *LAYER_NORMS)
    if index + 1 in full:
        heads = values.size("num_attention_heads")
        gate = values.flag("mla_use_output_gate", False)
        layer += latent_attention(hidden, heads, latent_sizes(values), gate=gate)
    else:
        layer += _kimi_delta(hidden, config)
    if values.says("attn_res_block_size"):
        layer += norms(
            hidden,
            *(f"{part}_res_{tensor}" for part in ("self_attention", "mlp") for tensor in ("norm", "proj")),
        )
    if index < values.size("first_k_dense_replace", default=0, least=0):
        return layer + plain_dense(values, index)
    return layer + _kimi_experts(values, hidden)


def _kimi_delta(hidden: int, config: ConfigValues) -> Block:
    heads, head_dim, kernel = (
        config.size("num_heads"),
        config.size("head_dim"),
        config.size("short_conv_kernel_size"),
    )
    inner, name = heads * head_dim, "self_attn"
    weights: list[WeightTensor] = []
    for projection in ("q_proj", "k_proj", "v_proj"):
        weights += linear("mixers", f"{name}.{projection}", inner, hidden, "rows")
    for convolution in ("q_conv1d", "k_conv1d", "v_conv1d"):
        weights.append(WeightTensor("mixers", inner, kernel, "rows", name=f"{name}.{convolution}"))
    weights += (
        *linear("mixers", f"{name}.f_a_proj", head_dim, hidden),
        *linear("mixers", f"{name}.f_b_proj", inner, head_dim, "rows"),
        *linear("mixers", f"{name}.b_proj", heads, hidden, "rows"),
        vector("mixers", f"{name}.A_log", heads, "rows"),
        vector("mixers", f"{name}.dt_bias", inner, "rows"),
        vector("norms", f"{name}.o_norm", head_dim),
    )
    if config.flag("use_full_rank_gate", False):
        weights += linear("mixers", f"{name}.g_proj", inner, hidden, "rows")
    else:
        weights += linear("mixers", f"{name}.g_a_proj", head_dim, hidden)
        weights += linear("mixers", f"{name}.g_b_proj", inner, head_dim, "rows")
    weights += linear("mixers", f"{name}.o_proj", hidden, inner, "columns")
    # TensorRT-LLM keeps as many inputs of the convolutions as their kernel is long (examples/kimi_k3/disagg/README.md).
    state_bytes = 3 * inner * kernel * 2 + heads * head_dim**2 * 4
    cache = Cache("linear attention", heads=heads, state=state_bytes, recurrent=heads * head_dim**2)
    return Block(tuple(weights), (cache,))


def _kimi_experts(values: ConfigValues, hidden: int) -> Block:
    inner = values.size("moe_intermediate_size")
    latent = values.size("routed_expert_hidden_size", default=0, least=0)
    name = "block_sparse_moe"
    layer = experts(
        hidden, inner, values.size("num_experts"), name=name, projections=W123, score_bias=True, latent=latent,
        shared=inner * values.size("num_shared_experts", default=0, least=0),
    )  # fmt: skip
    if latent:
        layer += Block(
            (
                *linear("experts", f"{name}.routed_expert_down_proj", latent, hidden),
                *linear("experts", f"{name}.routed_expert_up_proj", hidden, latent),
            )
        )
        if values.flag("latent_moe_use_norm", False):
            layer += norms(latent, f"{name}.routed_expert_norm")
    return layer


_KIMI = Family(_kimi)
_QWEN35 = Family(_qwen(plain_dense), "qwen3_5_text", draft=_qwen_draft(plain_dense, "mtp_num_hidden_layers"))
_QWEN35_MOE = Family(
    _qwen(qwen_experts), "qwen3_5_moe_text", draft=_qwen_draft(qwen_experts, "mtp_num_hidden_layers")
)

FAMILIES: Mapping[str, Family] = {
    # Its checkpoints bring one such layer, of which their configs say nothing.
    "Qwen3NextForCausalLM": Family(
        _qwen(qwen_experts, joined=True),
        "qwen3_next",
        draft=_qwen_draft(qwen_experts, "num_nextn_predict_layers", 1),
    ),
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5ForConditionalGeneration": replace(_QWEN35, vision=vision.qwen3_vl),
    "Qwen3_5MoeForCausalLM": _QWEN35_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN35_MOE, vision=vision.qwen3_vl),
    "KimiLinearForCausalLM": _KIMI,
    "KimiK3ForConditionalGeneration": replace(_KIMI, vision=vision.kimi),
}
