"""Description of a family, and the parts that many families share: heads, windows, feed-forwards, whole layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipeline.models.blocks import Block, WeightTensor, attention, experts, feed_forward, norms
from pipeline.models.config_values import MAX_LAYERS, ConfigValues

LayerOf = Callable[[ConfigValues, int], Block]
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def no_part(_values: ConfigValues) -> Block:
    """A model without such a part."""
    return Block()


def hidden_layers(values: ConfigValues) -> int:
    """Layers by `num_hidden_layers`."""
    return values.size("num_hidden_layers", most=MAX_LAYERS)


@dataclass(frozen=True, slots=True)
class Family:
    """How the decoders of a class are built.

    Attributes:
        layer: Block of a layer by its index.
        library: `model_type` of the decoder in transformers, whose defaults hold.
        tied: Whether the output projection is the embedding where the config leaves it open.
        layers: Number of layers.
        vision: Tower for images, and what joins it to the decoder.
        draft: Layers that predict further tokens (MTP), which are loaded for speculation alone.
        outer: Weights beside the layers other than embedding, output projection and last norm.
        head: Name of the output projection.
        embedding: Name of the embedding.
        norm: Name of the last norm.
        embeds: Whether it has an embedding; a draft head uses its target's.
    """

    layer: LayerOf
    library: str = ""
    tied: bool = False
    layers: Callable[[ConfigValues], int] = hidden_layers
    vision: Callable[[ConfigValues], Block] = no_part
    draft: Callable[[ConfigValues], Block] = no_part
    outer: Callable[[ConfigValues], Block] = no_part
    head: str = "lm_head"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    embeds: bool = True


# Sizes


def hidden_size(values: ConfigValues) -> int:
    """Width of the decoder."""
    return values.size("hidden_size")


def heads_of(values: ConfigValues) -> tuple[int, int, int]:
    """Heads, KV heads, and the size of a head."""
    heads = values.size("num_attention_heads")
    kv_heads = values.size("num_key_value_heads", default=heads)
    head_dim = values.size("head_dim", "attention_head_dim", default=max(1, hidden_size(values) // heads))
    return heads, kv_heads, head_dim


# Windows: (tokens of a window, tokens of a chunk), 0 for none

WindowOf = Callable[[ConfigValues, int], tuple[int, int]]


def no_window(_values: ConfigValues, _index: int) -> tuple[int, int]:
    """Every layer sees everything."""
    return 0, 0


def one_window(values: ConfigValues, _index: int) -> tuple[int, int]:
    """Every layer sees the same window, if there is one."""
    return _window(values), 0


def qwen_window(values: ConfigValues, index: int) -> tuple[int, int]:
    """Qwen: layers from `max_window_layers` on see a window, if it is switched on."""
    if not values.flag("use_sliding_window", False):
        return 0, 0
    kinds = layer_kinds(values)
    windowed = (
        kinds[index] == "sliding_attention" if kinds else index >= values.size("max_window_layers", least=0)
    )
    return (_window(values) if windowed else 0), 0


def window_pattern(every: int) -> WindowOf:
    """By `layer_types`, or one layer in `every` (or in `sliding_window_pattern`) sees everything, the last of them."""

    def window(values: ConfigValues, index: int) -> tuple[int, int]:
        kinds = layer_kinds(values)
        if not kinds:
            step = values.size("sliding_window_pattern", "_sliding_window_pattern", default=every)
            return (0 if (index + 1) % step == 0 else _window(values)), 0
        return (_window(values) if kinds[index] == "sliding_attention" else 0), 0

    return window


def _window(values: ConfigValues) -> int:
    return values.size("sliding_window", default=0, least=0)


def layer_kinds(
    values: ConfigValues,
    key: str = "layer_types",
    known: tuple[str, ...] = ("full_attention", "sliding_attention"),
) -> list[str]:
    """Kind of each layer, or an empty list; a kind that is not known is a fault, as is a list of the wrong length."""
    kinds, layers = values.texts(key), hidden_layers(values)
    if unknown := sorted(set(kinds) - set(known)):
        values.refuse(
            key, f"has layers that are not known: {', '.join(unknown[:8])}", f"known are {', '.join(known)}"
        )
        return []
    if kinds and len(kinds) != layers:
        values.refuse(key, f"has {len(kinds)} entries, for {layers} layers")
        return []
    return kinds


# Feed-forwards


def dense(values: ConfigValues, _index: int) -> Block:
    """Gated feed-forward."""
    inner = values.size("intermediate_size")
    return feed_forward(hidden_size(values), inner, bias=values.flag("mlp_bias", False))


def plain_dense(values: ConfigValues, _index: int) -> Block:
    """Gated feed-forward that has no biases, whatever the config says."""
    return feed_forward(hidden_size(values), values.size("intermediate_size"))


def deepseek_experts(values: ConfigValues, index: int) -> Block:
    """Dense first layers, then experts with shared ones of the same size, as DeepSeek V2 and V3 and GLM have them."""
    kinds = layer_kinds(values, "mlp_layer_types", ("dense", "sparse"))
    is_dense = (
        kinds[index] == "dense"
        if kinds and index < len(kinds)
        else (
            index < values.size("first_k_dense_replace", default=0, least=0)
            or index % values.size("moe_layer_freq", default=1) != 0
        )
    )
    if is_dense:
        return plain_dense(values, index)
    inner = values.size("moe_intermediate_size")
    shared = values.size("n_shared_experts", "num_shared_experts", default=0, least=0)
    return experts(
        hidden_size(values),
        inner,
        values.size("n_routed_experts", "num_experts"),
        score_bias=values.word("topk_method", "noaux_tc") == "noaux_tc",
        shared=shared * inner,
    )


def qwen_experts(values: ConfigValues, index: int) -> Block:
    """Experts in every `decoder_sparse_step`-th layer; with a shared one, a gate weighs it."""
    step = values.size("decoder_sparse_step", default=1)
    if index in values.sizes("mlp_only_layers") or (index + 1) % step:
        return plain_dense(values, index)
    shared = values.size("shared_expert_intermediate_size", default=0, least=0)
    return experts(
        hidden_size(values),
        values.size("moe_intermediate_size"),
        values.size("num_experts"),
        shared=shared,
        shared_name="shared_expert",
        shared_gate=bool(shared),
    )


# A whole layer


def decoder_layer(
    *,
    feed: LayerOf = dense,
    window: WindowOf = no_window,
    bias: bool | None = None,
    output_bias: bool | None = None,
    norm: Literal["", "head", "all"] = "",
    layer_norms: tuple[str, ...] = LAYER_NORMS,
    sinks: bool = False,
    norm_bias: bool = False,
) -> LayerOf:
    """Layer of attention, a feed-forward and norms.

    Args:
        bias: On queries, keys and values; None: as `attention_bias` says.
        output_bias: On the output projection; None: as `attention_bias` says.
        norm: Norm of queries and keys: over each "head", over "all" of them, or "" for none.
    """

    def layer(values: ConfigValues, index: int) -> Block:
        hidden = hidden_size(values)
        default = values.flag("attention_bias", False) if None in (bias, output_bias) else False
        width, chunk = window(values, index)
        return (
            attention(
                hidden, *heads_of(values), bias=default if bias is None else bias,
                output_bias=default if output_bias is None else output_bias,
                norm=norm, sinks=sinks, window=width, chunk=chunk,
            )
            + feed(values, index)
            + norms(hidden, *layer_norms, bias=norm_bias)
        )  # fmt: skip

    return layer


# Layers that predict further tokens


def next_layers(layer: LayerOf, *, copies: bool = True) -> Callable[[ConfigValues], Block]:
    """`num_nextn_predict_layers` behind the last layer, each like one of the model's, as DeepSeek publishes them.

    Args:
        copies: Whether each comes with an embedding and an output projection of its own.
    """

    def draft(values: ConfigValues) -> Block:
        hidden, layers = hidden_size(values), hidden_layers(values)
        block = Block()
        for index in range(
            layers, layers + values.size("num_nextn_predict_layers", default=0, least=0, most=64)
        ):
            part = Block((WeightTensor("mtp", hidden, 2 * hidden, name="eh_proj"),))
            part += norms(hidden, "enorm", "hnorm", "shared_head.norm") + layer(values, index)
            if copies:
                vocab = values.size("vocab_size")
                part += Block(
                    tuple(
                        WeightTensor("mtp", vocab, hidden, name=name)
                        for name in ("embed_tokens", "shared_head.head")
                    )
                )
            block += part.at(f"layers.{index}.")
        return block

    return draft
