"""Architecture of a decoder, from its config.json: sizes, rotary embedding, biases, norms, sliding windows.

Covers Llama, Qwen2, Qwen3, Mistral, Mixtral and Phi-3 (which is phi-4, too), in the layout that transformers 5
writes (`rope_parameters`) and in the one of most checkpoints on the hub (`rope_theta`, `rope_scaling`). What these
architectures can be told but we do not build (another activation, multi-dimensional positions, experts elsewhere) is
refused by name, all of it at once. Not every runtime takes every family; those say so themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import Fault, InvalidInput, SourceError
from pipeline.models.config_values import MAX_LAYERS, MAX_SIZE, class_of, declared_dtype
from pipeline.models.rope import Rope, rope_faults
from pipeline.models.sizes import ModelSizes, config_faults
from pipeline.reading import read_json

FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
}


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer that the architecture has."""

    name: str  # "model.layers.0.self_attn.q_proj"
    rows: int  # outputs
    columns: int  # inputs
    bias: bool
    router: bool = False  # it ranks experts, and keeps its precision


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer with rotary positions, RMS norms and a gated feed-forward."""

    family: str  # llama | mistral | qwen2 | qwen3 | mixtral | phi3
    class_name: str  # "LlamaForCausalLM"
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_epsilon: float
    rope: Rope
    tied: bool  # the output projection is the embedding
    qkv_bias: bool
    output_bias: bool  # on o_proj
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each head of q and k, before the rotation
    windows: tuple[int | None, ...]  # a layer: how many positions it sees; None: all
    dtype: str  # "bfloat16" | "float16" | "float32"
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    experts: int = 0  # in each feed-forward; 0: it is dense
    experts_per_token: int = 0
    fused: bool = False  # one weight for q, k and v, and one for gate and up

    @classmethod
    def read(cls, directory: Path) -> Architecture:
        """Read `directory`/config.json.

        Raises:
            InvalidInput: with every reason why the model cannot be built.
            SourceError: there is no config.json.
            UnreadableFile: it cannot be read.
        """
        path = directory / "config.json"
        if not path.exists():
            raise SourceError(f"{path} is missing: this is not a checkpoint")
        return cls.from_config(read_json(path), where=str(path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> Architecture:
        """Read the content of a config.json; `where` names it in errors.

        Raises:
            InvalidInput: with every reason why the model cannot be built.
        """
        try:
            faults = list(_faults(config)) or list(config_faults(_plain(config)))
            if not faults:
                return cls._of(config)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            faults = [Fault(f"has a value of another kind than it should: {error}")]
        raise InvalidInput(
            "This model cannot be built",
            [Fault(f.problem, where=where, key=f.key, value=f.value, fix=f.fix) for f in faults],
        )

    @classmethod
    def _of(cls, config: Mapping[str, Any]) -> Architecture:
        # How weights are stored is not asked here: those that we cannot dequantize have an architecture, too.
        sizes, family = ModelSizes.from_config(_plain(config)), FAMILIES[class_of(config)]
        assert sizes is not None, "its faults were looked for"
        held = {tensor.name for tensor in sizes.blocks[0].weights}
        attention = "layers.0.self_attn."
        eos = config.get("eos_token_id")
        return cls(
            family=family,
            class_name=sizes.architecture,
            hidden=sizes.hidden,
            layers=sizes.layers,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            intermediate=sizes.intermediate,
            vocab=sizes.vocab,
            max_positions=sizes.max_positions,
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rope=Rope.from_config(config),
            tied=sizes.tied,
            qkv_bias=f"{attention}q_proj.bias" in held,
            output_bias=f"{attention}o_proj.bias" in held,
            mlp_bias="layers.0.mlp.up_proj.bias" in held,
            qk_norm=f"{attention}q_norm" in held,
            windows=tuple(window or None for window in sizes.windows) or (None,) * sizes.layers,
            dtype=declared_dtype(config) or "float32",
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            experts=sizes.experts,
            experts_per_token=sizes.experts_per_token,
            fused=family == "phi3",
        )

    def linears(self) -> Iterator[LinearShape]:
        """Yield the linear layers of the blocks in the order of execution, without the output projection."""
        queries, pairs = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            attention = f"model.layers.{layer}.self_attn."
            if self.fused:
                yield LinearShape(attention + "qkv_proj", queries + 2 * pairs, self.hidden, self.qkv_bias)
            else:
                yield LinearShape(attention + "q_proj", queries, self.hidden, self.qkv_bias)
                yield LinearShape(attention + "k_proj", pairs, self.hidden, self.qkv_bias)
                yield LinearShape(attention + "v_proj", pairs, self.hidden, self.qkv_bias)
            yield LinearShape(attention + "o_proj", self.hidden, queries, self.output_bias)
            yield from self._feed_forward(f"model.layers.{layer}.")

    def _feed_forward(self, block: str) -> Iterator[LinearShape]:
        inner, hidden, mlp = self.intermediate, self.hidden, f"{block}mlp."
        if self.experts:
            moe = f"{block}block_sparse_moe."
            yield LinearShape(moe + "gate", self.experts, hidden, False, router=True)
            for expert in range(self.experts):
                yield LinearShape(f"{moe}experts.{expert}.w1", inner, hidden, False)
                yield LinearShape(f"{moe}experts.{expert}.w3", inner, hidden, False)
                yield LinearShape(f"{moe}experts.{expert}.w2", hidden, inner, False)
            return
        if self.fused:
            yield LinearShape(mlp + "gate_up_proj", 2 * inner, hidden, self.mlp_bias)
        else:
            yield LinearShape(mlp + "gate_proj", inner, hidden, self.mlp_bias)
            yield LinearShape(mlp + "up_proj", inner, hidden, self.mlp_bias)
        yield LinearShape(mlp + "down_proj", hidden, inner, self.mlp_bias)

    def output_projection(self) -> LinearShape:
        """`lm_head`; its weight is the embedding's where `tied`."""
        return LinearShape("lm_head", self.vocab, self.hidden, False)

    def norms(self) -> Iterator[tuple[str, int]]:
        """Yield name and size of every norm's weight."""
        for layer in range(self.layers):
            block = f"model.layers.{layer}."
            yield block + "input_layernorm.weight", self.hidden
            if self.qk_norm:
                yield block + "self_attn.q_norm.weight", self.head_dim
                yield block + "self_attn.k_norm.weight", self.head_dim
            yield block + "post_attention_layernorm.weight", self.hidden
        yield "model.norm.weight", self.hidden

    @property
    def embedding(self) -> str:
        """Name of the embedding's tensor."""
        return "model.embed_tokens.weight"


_REQUIRED = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def _plain(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "num_key_value_heads": int,
    "head_dim": int,
    "rms_norm_eps": (int, float),
    "sliding_window": int,
    "max_window_layers": int,
    "layer_types": list,
    "num_local_experts": int,
    "num_experts_per_tok": int,
    "bos_token_id": int,
    "eos_token_id": (int, list),
    "rope_theta": (int, float),
    "rope_parameters": dict,
    "rope_scaling": dict,
}


def _faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in tuple(FAMILIES):
        yield Fault("is not known", key="architectures", value=names, fix=f"one of {', '.join(FAMILIES)}")
        return  # another class has other keys
    for key in _REQUIRED:
        value, most = config.get(key), MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            yield Fault(f"must be a positive number of at most {most}", key=key, value=value)
    for key, kind in _KINDS.items():
        if config.get(key) is not None and not isinstance(config[key], kind):
            yield Fault("is of another kind than it should be", key=key, value=config[key])
    if config.get("hidden_act", "silu") != "silu":
        yield Fault("is not supported", key="hidden_act", value=config["hidden_act"], fix="silu")
    mixtral = names == ["MixtralForCausalLM"]
    if mixtral and not config.get("num_local_experts"):
        yield Fault(
            "must be a positive number", key="num_local_experts", value=config.get("num_local_experts")
        )
    for key, plain in (("num_experts", 0), ("num_local_experts", 0), ("pretraining_tp", 1)):
        if config.get(key) not in (None, 0, plain) and not (mixtral and key == "num_local_experts"):
            yield Fault("is not supported", key=key, value=config[key])
    yield from rope_faults(config)
