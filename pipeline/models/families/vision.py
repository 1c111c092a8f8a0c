"""Towers for images, and what joins them to the decoder. Every rank holds them whole, and they are never quantized.

Names are those of published checkpoints: of the classes in transformers 5.14.1, without what its conversion_mapping.py
renames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.models.blocks import GATED, Block, feed_forward, linear, norms, vector
from pipeline.models.config_values import ConfigValues
from pipeline.models.families.base import hidden_size

_FC = ("fc1", "fc2")
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")


def _matrix(name: str, rows: int, columns: int, *, bias: bool = True) -> Block:
    return Block(linear("vision", name, rows, columns, bias=bias))


def _layer(
    width: int, inner: int, *, bias: bool = True, mixer: str = "attn", projections: tuple[str, ...] = ("qkv", "proj"),
    mlp: tuple[str, ...] = _FC, mlp_bias: bool = True, feed: str = "mlp", norm_bias: bool = True,
    layer_norms: tuple[str, ...] = ("norm1", "norm2"),
) -> Block:  # fmt: skip
    """One layer of a tower: attention over all heads, a feed-forward, norms.

    Args:
        projections: Names in the attention; the first of two makes queries, keys and values together.
    """
    layer = Block()
    for projection in projections:
        rows = 3 * width if len(projections) == 2 and projection == projections[0] else width
        layer += _matrix(f"{mixer}.{projection}", rows, width, bias=bias)
    layer += feed_forward(width, inner, name=feed, kind="vision", projections=mlp, bias=mlp_bias)
    return layer + norms(width, *layer_norms, bias=norm_bias)


def _four(output: str = "o_proj", suffix: str = "") -> tuple[str, ...]:
    """Names of four projections of an attention."""
    return tuple(f"{projection}{suffix}" for projection in ("q_proj", "k_proj", "v_proj", output))


def _tower(place: str, layers: int, layer: Block) -> Block:
    tower = Block()
    for index in range(layers):
        tower += layer.at(f"{place}.{index}.")
    return tower


def _merger(
    name: str, inner: int, outputs: int, *, norm: int, norm_bias: bool = True,
    names: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2"),
) -> Block:  # fmt: skip
    """Norm, and two matrices: inner to inner, inner to outputs."""
    normed, first, second = (f"{name}.{part}" for part in names)
    return (
        norms(norm, normed, bias=norm_bias) + _matrix(first, inner, inner) + _matrix(second, outputs, inner)
    )


_QWEN2_MERGER = ("ln_q", "mlp.0", "mlp.2")


def _patches(v: ConfigValues, width: int, *, bias: bool = True) -> Block:
    size = v.size("in_channels", "in_chans") * v.size("temporal_patch_size")
    size *= v.size("patch_size") ** 2
    return _matrix("patch_embed.proj", width, size, bias=bias)


def qwen3_vl(values: ConfigValues) -> Block:
    """Qwen3-VL, Qwen3.5: mergers of several layers go to the decoder (`deepstack_visual_indexes`)."""
    v = values.inner("vision_config", "qwen3_vl_vision")
    width, outputs = v.size("hidden_size"), v.size("out_hidden_size", default=hidden_size(values))
    inner = width * v.size("spatial_merge_size") ** 2
    layer = _layer(width, v.size("intermediate_size"), mlp=("linear_fc1", "linear_fc2"))
    tower = _patches(v, width) + _tower("blocks", v.size("depth"), layer)
    tower += Block((vector("vision", "pos_embed", width * v.size("num_position_embeddings")),))
    tower += _merger("merger", inner, outputs, norm=width)
    for index in range(len(v.sizes("deepstack_visual_indexes"))):
        tower += _merger(f"deepstack_merger_list.{index}", inner, outputs, norm=inner)
    return tower.at("visual.")


def qwen2_vl(values: ConfigValues) -> Block:
    """Qwen2-VL."""
    v = values.inner("vision_config", "qwen2_vl_vision")
    width = v.size("embed_dim")
    outputs = v.size("hidden_size")
    inner = width * v.size("spatial_merge_size") ** 2
    layer = _layer(width, width * v.size("mlp_ratio"))
    tower = _patches(v, width, bias=False) + _tower("blocks", v.size("depth"), layer)
    return (tower + _merger("merger", inner, outputs, norm=width, names=_QWEN2_MERGER)).at("visual.")


def qwen2_5_vl(values: ConfigValues) -> Block:
    """Qwen2.5-VL: a gated feed-forward with biases, norms without."""
    v = values.inner("vision_config", "qwen2_5_vl_vision")
    width = v.size("hidden_size")
    outputs = v.size("out_hidden_size", default=hidden_size(values))
    inner = width * v.size("spatial_merge_size") ** 2
    layer = _layer(width, v.size("intermediate_size"), mlp=GATED, norm_bias=False)
    tower = _patches(v, width, bias=False) + _tower("blocks", v.size("depth"), layer)
    merger = _merger("merger", inner, outputs, norm=width, norm_bias=False, names=_QWEN2_MERGER)
    return (tower + merger).at("visual.")


_CLIP: Mapping[str, Any] = {
    "mixer": "self_attn",
    "projections": _four("out_proj"),
    "layer_norms": ("layer_norm1", "layer_norm2"),
}


def gemma3(values: ConfigValues) -> Block:
    """Gemma 3: SigLIP and a projection."""
    v = values.inner("vision_config", "siglip_vision_model")
    width = v.size("hidden_size")
    patch = v.size("patch_size")
    count = (v.size("image_size") // patch) ** 2
    layer = _layer(width, v.size("intermediate_size"), **_CLIP)
    layers = v.size("num_hidden_layers")
    tower = _matrix("embeddings.patch_embedding", width, 3 * patch**2) + _tower(
        "encoder.layers", layers, layer
    )
    tower += Block((vector("vision", "embeddings.position_embedding", count * width),))
    tower += norms(width, "post_layernorm", bias=True)
    joined = _matrix("mm_input_projection_weight", width, hidden_size(values), bias=False)
    joined += norms(width, "mm_soft_emb_norm")
    return tower.at("vision_tower.vision_model.") + joined.at("multi_modal_projector.")


def gemma4(values: ConfigValues) -> Block:
    """Gemma 4: norms of each head's queries and keys, four norms a layer, positions along two axes."""
    if not values.says("vision_config"):
        return Block()
    v = values.inner("vision_config", "gemma4_vision")
    width = v.size("hidden_size")
    head = v.size("head_dim")
    four = (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    layer = _layer(width, v.size("intermediate_size"), bias=False, mixer="self_attn",
                   projections=_four(suffix=".linear"), mlp=tuple(f"{projection}.linear" for projection in GATED),
                   mlp_bias=False, norm_bias=False, layer_norms=four)  # fmt: skip
    layer += norms(head, "self_attn.q_norm", "self_attn.k_norm")
    layers = v.size("num_hidden_layers")
    tower = _matrix("patch_embedder.input_proj", width, 3 * v.size("patch_size") ** 2, bias=False)
    positions = 2 * v.size("position_embedding_size") * width
    tower += Block((vector("vision", "patch_embedder.position_embedding_table", positions),))
    if v.flag("standardize", False):
        tower += norms(width, "std_bias", "std_scale")
    tower += _tower("encoder.layers", layers, layer)
    joined = _matrix("embed_vision.embedding_projection", hidden_size(values), width, bias=False)
    return tower.at("vision_tower.") + joined


def llama4(values: ConfigValues) -> Block:
    """Llama 4: a tower with a token for the whole image, and an adapter of two matrices."""
    v = values.inner("vision_config", "llama4_vision_model")
    width = v.size("hidden_size")
    layers = v.size("num_hidden_layers")
    inner, patch = v.size("intermediate_size"), v.size("patch_size")
    count = (v.size("image_size") // patch) ** 2 + 1
    tower = _matrix("patch_embedding.linear", width, 3 * patch**2, bias=False)
    positions = vector("vision", "positional_embedding_vlm", count * width)
    tower += Block((vector("vision", "class_embedding", width), positions))
    tower += norms(width, "layernorm_pre", "layernorm_post", bias=True)
    layer = _layer(width, inner, mixer="self_attn", projections=_four(), layer_norms=_LLAMA_NORMS)
    tower += _tower("model.layers", layers, layer)
    joined, outputs = v.size("projector_input_dim"), v.size("projector_output_dim")
    tower += _matrix("vision_adapter.mlp.fc1", joined, inner, bias=False)
    tower += _matrix("vision_adapter.mlp.fc2", outputs, joined, bias=False)
    last = _matrix("linear_1", hidden_size(values), v.size("vision_output_dim"), bias=False)
    return tower.at("vision_model.") + last.at("multi_modal_projector.")


def pixtral(values: ConfigValues) -> Block:
    """Mistral Small 3.1 and newer: Pixtral's tower without biases, patches merged by one matrix."""
    v = values.inner("vision_config", "pixtral")
    width = v.size("hidden_size")
    layers = v.size("num_hidden_layers")
    layer = _layer(width, v.size("intermediate_size"), bias=False, mixer="attention", projections=_four(), mlp=GATED,
                   mlp_bias=False, feed="feed_forward", norm_bias=False,
                   layer_norms=("attention_norm", "ffn_norm"))  # fmt: skip
    tower = _matrix("patch_conv", width, 3 * v.size("patch_size") ** 2, bias=False)
    tower += norms(width, "ln_pre") + _tower("transformer.layers", layers, layer)
    hidden, bias = hidden_size(values), values.flag("multimodal_projector_bias", False)
    merged = values.size("spatial_merge_size", default=2) ** 2 * width
    joined = norms(width, "norm") + _matrix("patch_merger.merging_layer", width, merged, bias=False)
    joined += _matrix("linear_1", hidden, width, bias=bias) + _matrix("linear_2", hidden, hidden, bias=bias)
    return tower.at("vision_tower.") + joined.at("multi_modal_projector.")


def kimi(values: ConfigValues) -> Block:
    """Kimi K2.5 and newer: MoonViT with positions in three dimensions, and a projector of merged patches."""
    v = values.inner("vision_config", "kimi_k25_vision")
    width = v.size("vt_hidden_size", "hidden_size")
    heads = v.size("qkv_hidden_size", default=width)
    bias, norm_bias = v.flag("attn_bias", True), v.word("norm_type", "layernorm") == "layernorm"
    mlp_bias = v.flag("linear_bias", True)
    layer = _matrix("wqkv", 3 * heads, width, bias=bias) + _matrix("wo", width, heads, bias=bias)
    inner = v.size("vt_intermediate_size", "intermediate_size")
    layer += feed_forward(width, inner, kind="vision", projections=("fc0", "fc1"), bias=mlp_bias)
    layer += norms(width, "norm0", "norm1", bias=norm_bias)
    tower = _matrix("patch_embed.proj", width, 3 * v.size("patch_size") ** 2,
                    bias=v.flag("patch_embed_proj_bias", True))  # fmt: skip
    positions = (
        v.size("init_pos_emb_height", "pos_emb_height")
        * v.size("init_pos_emb_width", "pos_emb_width")
        * width
    )
    tower += Block((vector("vision", "patch_embed.pos_emb", positions),))
    tower += _tower("encoder.blocks", v.size("vt_num_hidden_layers", "num_hidden_layers"), layer)
    tower += norms(width, "encoder.final_layernorm", bias=norm_bias)
    kernel = v.sizes("merge_kernel_size") or [2, 2]
    merged = width
    for side in kernel:
        merged *= side
    joined = norms(v.size("mm_hidden_size", default=width), "pre_norm", bias=norm_bias)
    joined += _matrix("proj.0", merged, merged) + _matrix("proj.2", hidden_size(values), merged)
    return tower.at("vision_tower.") + joined.at("mm_projector.")


def minimax(values: ConfigValues) -> Block:
    """MiniMax M3: CLIP's layers over patches of two frames; a projector, and one that merges patches."""
    v = values.inner("vision_config", "minimax_m3_vl_vision")
    width, hidden = v.size("hidden_size"), hidden_size(values)
    layer = _layer(width, v.size("intermediate_size"), **_CLIP)
    size = 3 * v.size("temporal_patch_size") * v.size("patch_size") ** 2
    tower = _matrix("embeddings.patch_embedding", width, size, bias=False) + norms(
        width, "pre_layrnorm", bias=True
    )
    tower += _tower("encoder.layers", v.size("num_hidden_layers"), layer)
    inner = values.size("projector_hidden_size", default=hidden)
    merged = v.size("spatial_merge_size") ** 2 * hidden
    joined = _matrix("linear_1", inner, width) + _matrix("linear_2", hidden, inner)
    merging = _matrix("linear_1", inner, merged) + _matrix("linear_2", hidden, inner)
    tower = tower.at("vision_tower.vision_model.")
    return tower + joined.at("multi_modal_projector.") + merging.at("patch_merge_mlp.")
