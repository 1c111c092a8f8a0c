"""Nemotron-H and Nemotron 3: one mixer a layer, Mamba, attention, a feed-forward or experts, in a pattern.

`hybrid_override_pattern` says which ("M", "*", "-", "E"); newer configs list `layers_block_type`. Experts may work in a
smaller space (`moe_latent_size`), between two projections that all of them share.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.blocks import (
    PLAIN,
    Block,
    WeightTensor,
    attention,
    experts,
    feed_forward,
    linear,
    mamba,
    norms,
)
from pipeline.models.config_values import MAX_LAYERS, ConfigValues
from pipeline.models.families.base import Family, heads_of, hidden_size

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# As transformers 5 writes them.
_OTHERS = {"linear_attention": "mamba", "full_attention": "attention"}


def _kinds(
    values: ConfigValues, pattern: str = "hybrid_override_pattern", listed: str = "layers_block_type"
) -> list[str]:
    letters = values.word(pattern)
    kinds = [_LETTERS.get(letter, letter) for letter in letters]
    if not letters:
        kinds = [_OTHERS.get(kind, kind) for kind in values.texts(listed)]
    if unknown := sorted(set(kinds) - set(_LETTERS.values())):
        known = f"known are {', '.join(_LETTERS)} and {', '.join(_LETTERS.values())}"
        values.refuse(pattern if letters else listed, f"has layers that are not known: {unknown[:8]}", known)
        return []
    return kinds


def _layers(values: ConfigValues) -> int:
    kinds = _kinds(values)
    count = values.get("num_hidden_layers")
    if not kinds:
        values.refuse("hybrid_override_pattern", "must say of each layer what it is")
    elif count is not None and values.size("num_hidden_layers", most=MAX_LAYERS) != len(kinds):
        values.refuse("num_hidden_layers", f"is not the number of layers in the pattern, {len(kinds)}")
    return len(kinds)


def _mixer(values: ConfigValues, kind: str) -> Block:
    hidden = hidden_size(values)
    mlp_bias = values.flag("mlp_bias", False)
    if kind == "mamba":
        return mamba(
            hidden,
            values.size("mamba_num_heads"),
            values.size("mamba_head_dim"),
            values.size("n_groups", "mamba_n_groups"),
            values.size("ssm_state_size"),
            values.size("conv_kernel"),
            bias=values.flag("use_bias", False),
            conv_bias=values.flag("use_conv_bias", True),
            state_dtype=values.choice("mamba_ssm_cache_dtype", "float32", ("float32", "bfloat16", "float16")),
        )
    if kind == "attention":
        bias = values.flag("attention_bias", False)
        return attention(hidden, *heads_of(values), bias=bias, output_bias=bias, name="mixer")
    if kind == "mlp":
        inner = values.size("intermediate_size")
        return feed_forward(hidden, inner, name="mixer", projections=PLAIN, bias=mlp_bias)
    return _experts(values, hidden)


def _experts(values: ConfigValues, hidden: int) -> Block:
    latent = values.size("moe_latent_size", default=0, least=0)
    shared = values.size("moe_shared_expert_intermediate_size", default=0, least=0)
    layer = experts(
        hidden, values.size("moe_intermediate_size"), values.size("n_routed_experts"), name="mixer",
        score_bias=True, projections=PLAIN, latent=latent,
        shared=shared * values.size("n_shared_experts", default=1, least=0),
    )  # fmt: skip
    if latent:
        layer += Block(
            (
                *linear("experts", "mixer.fc1_latent_proj", latent, hidden),
                *linear("experts", "mixer.fc2_latent_proj", hidden, latent),
            )
        )
    return layer


def _layer(values: ConfigValues, index: int) -> Block:
    return _mixer(values, _kinds(values)[index]) + norms(hidden_size(values), "norm")


def _draft(values: ConfigValues) -> Block:
    """Layers in a pattern of their own; the first joins embedding and hidden state, the last ends with a norm.

    As NVIDIA/TensorRT-LLM's NemotronHMTPDecoderLayer has them (file index ids 4069946320 and, newer, 51772101214).
    """
    hidden, block = hidden_size(values), Block()
    kinds = _kinds(values, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    for repeat in range(values.size("num_nextn_predict_layers", default=0, least=0, most=64)):
        for index, kind in enumerate(kinds):
            part = _mixer(values, kind) + norms(hidden, "norm")
            if not index:
                part += Block((WeightTensor("mtp", hidden, 2 * hidden, name="eh_proj"),)) + norms(
                    hidden, "enorm", "hnorm"
                )
            if index == len(kinds) - 1:
                part += norms(hidden, "final_layernorm")
            block += part.at(f"mtp.layers.{repeat * len(kinds) + index}.")
    return block


FAMILIES: Mapping[str, Family] = {
    "NemotronHForCausalLM": Family(
        _layer, "nemotron_h", layers=_layers, draft=_draft, embedding="embeddings", norm="norm_f"
    ),
}
