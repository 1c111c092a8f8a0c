"""A decoder by its config.json: its sizes, the weights of each layer, and what it keeps of a sequence.

Every class that `pipeline.models.families` describes is read, also those that we cannot convert; any other is refused
by name, as is a quantization that is not known (`pipeline.models.published`). What a model computes is not judged here:
`pipeline.models.Architecture` does that, of the families that are built. Published models by name are data in
`pipeline.contracts.models`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from pipeline.errors import Fault
from pipeline.models.blocks import Block, Cache, LatentAttention, WeightTensor, vector
from pipeline.models.config_values import ConfigValues, class_of, declared_dtype
from pipeline.models.families import FAMILIES, Family
from pipeline.models.families.base import heads_of
from pipeline.models.families.latent import latent_sizes
from pipeline.models.published import read_published
from pipeline.models.rope import DEFAULT_THETA, rope_settings

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_BUILT_OF_WORDS = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a decoder, its weights, and what its KV cache takes."""

    architecture: str  # class name: "LlamaForCausalLM"
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of one expert, where there are experts
    vocab: int
    max_positions: int
    # theta, kind, and the parameters of the kind
    rope: Mapping[str, float | str] = field(default_factory=dict)
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False  # the output projection is the embedding
    latent: LatentAttention | None = None
    dtype: str = "bfloat16"  # of the weights that are not quantized
    # Format of most of the published weights that are quantized: a name of `contracts/data/engine_memory.yaml`.
    stored: str = "none"
    quantized_by: str = ""  # quant_method: "modelopt", "compressed-tensors"
    kv_cache: str | None = (
        None  # type of keys and values that the checkpoint asks for; None: it leaves it open
    )
    blocks: tuple[Block, ...] = ()  # of each layer
    first: tuple[WeightTensor, ...] = ()  # before the layers: embedding, towers for images
    last: tuple[
        WeightTensor, ...
    ] = ()  # behind them: norm, and the output projection unless it is the embedding
    draft: tuple[WeightTensor, ...] = ()  # layers that predict further tokens, loaded for speculation alone
    draft_caches: tuple[Cache, ...] = ()  # of those layers

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], beside: Mapping[str, Any] | None = None
    ) -> ModelSizes | None:
        """Read a Hugging Face config.json, and the hf_quant_config.json beside it.

        Returns:
            The sizes, or None if this is not the config of a decoder that can be read; `config_faults` says why.
        """
        return _read(config, beside)[0]

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens that each layer sees, 0 for all; empty where every layer sees all."""
        windows = tuple(max((cache.window for cache in block.caches), default=0) for block in self.blocks)
        return windows if any(windows) else ()

    @property
    def stored_formats(self) -> tuple[str, ...]:
        """Formats of the published weights that are quantized, the most common first."""
        count: Counter[str] = Counter()
        for weight in self.weights():
            count[weight.stored] += weight.parameters
        return tuple(form for form, _ in count.most_common() if form != "none")

    def weights(self) -> Iterator[WeightTensor]:
        """Yield every weight that a server loads: all but `draft`."""
        yield from self.first
        for block in self.blocks:
            yield from block.weights
        yield from self.last


def config_faults(config: object, beside: Mapping[str, Any] | None = None) -> tuple[Fault, ...]:
    """List why a config.json is not one of a decoder that can be read; empty if it is."""
    if not isinstance(config, Mapping):
        return (Fault("is not an object", key="config.json"),)
    return _read(config, beside)[1]


def unknown_parts(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> tuple[Fault, ...]:
    """List what a config.json names that is not known here: its class, or how its weights are quantized."""
    unknown = () if class_of(config) in FAMILIES else (_unknown_class(config),)
    return (*unknown, *read_published(config, beside)[1])


def _unknown_class(config: Mapping[str, Any]) -> Fault:
    names = config.get("architectures")
    return Fault("is not known", key="architectures", value=names, fix=f"known are {', '.join(FAMILIES)}")


@dataclass(frozen=True, slots=True)
class _Files:
    """Content of config.json and of the file beside it, equal to any other that reads the same."""

    text: str
    config: Mapping[str, Any] = field(compare=False)
    beside: Mapping[str, Any] | None = field(compare=False)


def _read(
    config: Mapping[str, Any], beside: Mapping[str, Any] | None
) -> tuple[ModelSizes | None, tuple[Fault, ...]]:
    """Sizes, or the faults; a model of many layers takes a tenth of a second, and a plan asks for it many times."""
    try:
        text = repr((config, beside))
    except RecursionError:  # lists in lists in lists
        return _read_files.__wrapped__(_Files("", config, beside))
    return _read_files(_Files(text, config, beside))


@lru_cache(maxsize=32)
def _read_files(files: _Files) -> tuple[ModelSizes | None, tuple[Fault, ...]]:
    config, beside = files.config, files.beside
    name = class_of(config)
    family = FAMILIES.get(name)
    if family is None:
        return None, (_unknown_class(config),)
    values = ConfigValues(config, family.library)
    quantization, unread = read_published(config, beside)
    try:
        sizes = _sizes(name, family, values, config)
    except _BUILT_OF_WORDS as error:
        values.faults.setdefault(
            "", Fault(f"has a value of another kind than it should: {error}", key="config.json")
        )
        sizes = None
    faults = (*values.faults.values(), *unread)
    if faults or sizes is None:
        return None, faults
    read = replace(
        sizes,
        kv_cache=quantization.kv_cache,
        blocks=tuple(Block(quantization.stored(block.weights), block.caches) for block in sizes.blocks),
        first=quantization.stored(sizes.first),
        last=quantization.stored(sizes.last),
        draft=quantization.stored(sizes.draft),
    )
    if quantization.unmatched((*read.weights(), *read.draft)):
        return None, (Fault("names no layer that the model has", key="quantization_config"),)
    stored = next(iter(read.stored_formats), "none")
    return replace(read, stored=stored, quantized_by=quantization.method), ()


def _sizes(name: str, family: Family, values: ConfigValues, config: Mapping[str, Any]) -> ModelSizes:
    """The sizes without formats; faults are in `values`."""
    hidden, vocab = values.size("hidden_size"), values.size("vocab_size")
    layers = family.layers(values)
    blocks = [family.layer(values, index).at(f"layers.{index}.") for index in range(layers)]
    heads, kv_heads, head_dim = heads_of(values)
    tied = values.flag("tie_word_embeddings", family.tied, outer=True)
    routed = [weight for block in blocks for weight in block.weights if weight.is_expert]
    kinds = {cache.kind for block in blocks for cache in block.caches}
    outer, draft = family.outer(values).weights, family.draft(values)
    values.refuse_unread(name)
    embedding = WeightTensor("embedding", vocab, hidden, "vocabulary", name=family.embedding)
    outputs = values.size("draft_vocab_size", default=vocab)
    head = WeightTensor("lm_head", outputs, hidden, "vocabulary", name=family.head)
    return ModelSizes(
        architecture=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(blocks, kv_heads),
        head_dim=head_dim,
        intermediate=_inner(routed or [weight for block in blocks for weight in block.weights]),
        vocab=vocab,
        max_positions=values.size("max_position_embeddings"),
        rope=_rope(config),
        experts=max((weight.copies for weight in routed), default=0),
        experts_per_token=values.size(*_EXPERTS_PER_TOKEN, most=routed[0].copies) if routed else 0,
        tied=tied,
        latent=latent_sizes(values) if "latent attention" in kinds else None,
        dtype=declared_dtype(config) or "bfloat16",
        blocks=tuple(blocks),
        first=((embedding,) if family.embeds else ())
        + outer
        + family.vision(values).whole().as_kind("vision"),
        last=(vector("norms", family.norm, hidden), *(() if tied else (head,))),
        draft=draft.as_kind("mtp"),
        draft_caches=draft.caches,
    )


def _kv_heads(blocks: list[Block], default: int) -> int:
    """KV heads of the layer with the fewest, which decide over how many ranks they can be shared."""
    kinds = ("full attention", "sliding window", "chunked attention")
    heads = [cache.heads for block in blocks for cache in block.caches if cache.kind in kinds and cache.heads]
    return min(heads, default=default)


def _inner(weights: list[WeightTensor]) -> int:
    """Inner size of the experts, or of the largest feed-forward."""
    kinds = ("mlp", "experts")
    return max(
        (weight.rows for weight in weights if weight.kind in kinds and weight.split == "rows"), default=0
    )


_ROPE_NAMES: Mapping[str, str] = {
    "rope_theta": "theta",
    "rope_type": "kind",
    "original_max_position_embeddings": "original_max_positions",
}


def _rope(config: Mapping[str, Any]) -> Mapping[str, float | str]:
    """Rotary settings of either layout of config.json, under shorter names."""
    text = config.get("text_config")
    settings = {"rope_theta": DEFAULT_THETA, **rope_settings(text if isinstance(text, Mapping) else config)}
    return {
        _ROPE_NAMES.get(name, name): value
        for name, value in settings.items()
        if isinstance(value, int | float | str)
    }


__all__ = ["LatentAttention", "ModelSizes", "class_of", "config_faults", "declared_dtype", "unknown_parts"]
