"""The sizes of a decoder, from its config.json: what memory and speed are computed from.

Reads every family whose weights can be counted, also those that we cannot convert. Families whose configs leave things
unsaid (which have biases, which norms, which layers see a window) are told apart by the name of their class, as
transformers 5.14 does. What a model computes is not judged here: `pipeline.models.Architecture` does that, of the
families that are built, and takes its sizes from here. Sizes of published models by name are data in
`pipeline.contracts.models`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import Fault
from pipeline.models.quantization import stored_format
from pipeline.models.rope import DEFAULT_THETA, rope_settings

# Above every published model: lists as long as a model is deep are made from its config.json.
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
# Classes that have no bias in the output projection and the feed-forward, whatever config.json says.
_FIXED_BIASES = ("Mistral", "Mixtral", "Phi3", "Qwen2")
_MIXTRAL_EXPERTS_PER_TOKEN = 2


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek V2, V3): the cache holds one compressed vector a token for all heads."""

    kv_rank: int  # kv_lora_rank
    rope: int  # qk_rope_head_dim
    nope: int  # qk_nope_head_dim
    value: int  # v_head_dim
    query_rank: int = 0  # q_lora_rank; 0: queries are not compressed


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a decoder, and what else decides how many weights it has and what its KV cache takes."""

    architecture: str  # class name: "LlamaForCausalLM"
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of one expert, where there are experts
    vocab: int
    max_positions: int
    rope: Mapping[str, float | str] = field(
        default_factory=dict
    )  # theta, kind, and the parameters of the kind
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False  # the output projection is the embedding
    qkv_bias: bool = False
    output_bias: bool = False  # on o_proj
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before the rotation
    layer_norms: int = 2  # of the hidden size, in each layer
    latent: LatentAttention | None = None
    windows: tuple[int, ...] = ()  # tokens that each layer sees, 0 for all; (): every layer sees all
    shared_intermediate: int = 0  # of the experts that every token passes, together
    shared_gate: bool = False  # a gate weighs those shared experts
    expert_bias: bool = False  # on the router and on each expert
    sinks: bool = False  # a learned logit for each attention head
    score_bias: bool = False  # a number for each expert, by which the router chooses
    dense_layers: int = 0  # in a model with experts, how many of its first layers have none
    dense_intermediate: int = 0
    draft_vocab: int = 0  # of an Eagle-3 head, which proposes from so many tokens
    dtype: str = "bfloat16"  # of the weights that are not quantized
    # Format of the published weights: a recipe's word, fp8_block, mxfp4, or config.json's own word for another one.
    stored: str = "none"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelSizes | None:
        """Read the sizes of a Hugging Face config.json.

        Returns:
            The sizes, or None if this is not the config of a decoder that can be read.
        """
        if any(size_faults(config)):
            return None
        try:
            sizes = read_sizes(config)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
            return None
        counts = [value for value in map(sizes.__getattribute__, cls.__slots__) if isinstance(value, int)]
        return sizes if all(0 <= count <= MAX_SIZE for count in counts) else None


def read_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """Read the sizes of a config.json without `size_faults`.

    Raises:
        AttributeError, LookupError, TypeError, ValueError, ArithmeticError: a value is of another type than it should.
    """
    name = class_of(config)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    experts = _experts(config)
    expert_size = config.get("moe_intermediate_size") if experts else None
    bias = bool(config.get("attention_bias", False))
    fixed_biases = name.startswith(_FIXED_BIASES)
    return ModelSizes(
        architecture=name,
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=int(expert_size or config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        rope=_rope(config),
        experts=experts,
        experts_per_token=_experts_per_token(config) if experts else 0,
        tied=bool(config.get("tie_word_embeddings", name.startswith("Gemma"))),
        qkv_bias=name.startswith("Qwen2") or (bias and not fixed_biases),
        output_bias=bias and not fixed_biases,
        mlp_bias=bool(config.get("mlp_bias", False)) and not name.startswith((*_FIXED_BIASES, "Qwen3")),
        qk_norm=name.startswith(("Qwen3", "Gemma3")),
        layer_norms=4 if name.startswith(("Gemma2", "Gemma3")) else 2,
        latent=_latent(config),
        windows=_windows(config),
        shared_intermediate=_shared(config) if experts else 0,
        shared_gate=bool(experts and config.get("shared_expert_intermediate_size")),
        expert_bias=name.startswith("GptOss"),
        sinks=name.startswith("GptOss"),
        score_bias=name.startswith("DeepseekV3"),
        dense_layers=int(config.get("first_k_dense_replace") or 0) if experts else 0,
        dense_intermediate=int(config["intermediate_size"]) if experts else 0,
        draft_vocab=int(config.get("draft_vocab_size") or 0),
        dtype=declared_dtype(config) or "bfloat16",
        stored=stored_format(config),
    )


def config_faults(config: object) -> tuple[Fault, ...]:
    """List why a config.json is not one of a decoder that can be read; empty if it is."""
    if not isinstance(config, Mapping):
        return (Fault("is not an object", key="config.json"),)
    faults = tuple(size_faults(config))
    if not faults and ModelSizes.from_config(config) is None:
        return (Fault("has values that we cannot read", key="config.json"),)
    return faults


def size_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each required size of a config.json that is absent or out of range."""
    for key in _REQUIRED:
        value, most = config.get(key), MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            yield Fault(f"must be a positive number of at most {most}", key=key, value=value)


def class_of(config: object) -> str:
    """Return the first class that a config.json names ("LlamaForCausalLM"), or "" if it names none."""
    names = config.get("architectures") if isinstance(config, Mapping) else None
    return str(names[0]) if isinstance(names, list) and names else ""


def declared_dtype(config: Mapping[str, Any]) -> str:
    """Return the type that a config.json declares for the weights ("bfloat16"), or "" if it declares none."""
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def _experts(config: Mapping[str, Any]) -> int:
    counts = (config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    return int(next((count for count in counts if count), 0))


def _experts_per_token(config: Mapping[str, Any]) -> int:
    default = _MIXTRAL_EXPERTS_PER_TOKEN if class_of(config).startswith("Mixtral") else 0
    return int(config.get("num_experts_per_tok") or default)


def _shared(config: Mapping[str, Any]) -> int:
    each = int(config.get("n_shared_experts") or 0) * int(config.get("moe_intermediate_size") or 0)
    return each or int(config.get("shared_expert_intermediate_size") or 0)


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        kv_rank=int(config["kv_lora_rank"]),
        rope=int(config["qk_rope_head_dim"]),
        nope=int(config["qk_nope_head_dim"]),
        value=int(config["v_head_dim"]),
        query_rank=int(config.get("q_lora_rank") or 0),
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Window of each layer: by `layer_types`, a pattern (Gemma 3), Qwen's `max_window_layers`, or one for all."""
    window, layers, name = config.get("sliding_window"), int(config["num_hidden_layers"]), class_of(config)
    qwen = name.startswith("Qwen")
    if not window or name.startswith("Llama") or (qwen and not config.get("use_sliding_window", False)):
        return ()
    pattern = config.get("sliding_window_pattern") or (2 if name.startswith("Gemma2") else None)
    if kinds := config.get("layer_types"):
        full = [kind == "full_attention" for kind in kinds]
    elif pattern:
        full = [(layer + 1) % int(pattern) == 0 for layer in range(layers)]
    else:
        full = [qwen and layer < int(config.get("max_window_layers", 28)) for layer in range(layers)]
    return tuple(0 if sees_all else int(window) for sees_all in full)


_ROPE_NAMES: Mapping[str, str] = {
    "rope_theta": "theta",
    "rope_type": "kind",
    "original_max_position_embeddings": "original_max_positions",
}


def _rope(config: Mapping[str, Any]) -> Mapping[str, float | str]:
    """Rotary settings of either layout of config.json, under the names of `contracts/data/models`."""
    settings = {"rope_theta": DEFAULT_THETA, **rope_settings(config)}
    return {
        _ROPE_NAMES.get(name, name): value
        for name, value in settings.items()
        if isinstance(value, int | float | str)
    }
