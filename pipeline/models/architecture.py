"""Architecture of a decoder, from its config.json: sizes, rotary embedding, biases, norms, windows, experts.

Covers the classes of `FAMILIES`, in the layout that transformers 5 writes (`rope_parameters`) and in the one of most
checkpoints on the hub (`rope_theta`, `rope_scaling`). Which weights there are follows from `pipeline.models.families`.
What these classes can be told but we do not build (another activation, multi-dimensional positions, experts elsewhere)
is refused by name, all of it at once. Not every runtime takes every family; those say so themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.errors import Fault, InvalidInput, SourceError
from pipeline.models.blocks import Block
from pipeline.models.config_values import MAX_LAYERS, MAX_SIZE, class_of, declared_dtype, decoder_config
from pipeline.models.rope import WINDOWED, Rope, rope_faults
from pipeline.models.sizes import ModelSizes, config_faults
from pipeline.reading import read_json

FAMILIES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",  # its decoder alone
    "GptOssForCausalLM": "gpt_oss",
}
_GEMMA = ("gemma2", "gemma3")
_COARSE_NORMS = ("mixtral", "phi3", "gpt_oss")  # 1e-5 where config.json says nothing, as in transformers 5.14
_ROUTERS = (".gate", ".router")


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
    """A decoder-only transformer with rotary positions, RMS norms and gated feed-forwards."""

    family: str  # a value of FAMILIES
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
    layer_linears: tuple[LinearShape, ...] = field(repr=False)
    layer_vectors: tuple[tuple[str, int], ...] = field(
        repr=False
    )  # names and sizes of what has one dimension
    attention_scale: float  # by which scores are multiplied
    local_rope: Rope | None = None  # of windowed layers, where they have one of their own
    attention_cap: float | None = None  # scores are `cap * tanh(score / cap)`
    logits_cap: float | None = None
    experts: int = 0  # in each feed-forward that is not dense; 0: all are
    experts_per_token: int = 0
    renormalize: bool = True  # shares of a token's experts sum up to 1
    sparse: tuple[bool, ...] = ()  # a layer: whether it has experts
    fused: bool = False  # one weight for q, k and v, and one for gate and up
    stacked: bool = False  # all experts of a layer in one tensor, [experts, in, out]

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
            if class_of(config) in FAMILIES:
                config = decoder_config(config)
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
        names = {tensor.name for tensor in sizes.blocks[0].weights}
        fused, stacked, is_gemma = family == "phi3", family == "gpt_oss", family in _GEMMA
        scale = config.get("query_pre_attn_scalar") or 256 if is_gemma else sizes.head_dim
        caps = {
            key: config.get(f"{key}_softcapping", default) for key, default in _CAPS.get(family, {}).items()
        }
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
            norm_epsilon=float(config.get("rms_norm_eps", 1e-5 if family in _COARSE_NORMS else 1e-6)),
            rope=Rope.from_config(config),
            local_rope=Rope.from_config(config, WINDOWED) if family == "gemma3" else None,
            tied=sizes.tied,
            qkv_bias=f"{attention}q_proj.bias" in names,
            output_bias=f"{attention}o_proj.bias" in names,
            mlp_bias="layers.0.mlp.up_proj.bias" in names,
            qk_norm=f"{attention}q_norm" in names,
            windows=tuple(window or None for window in sizes.windows) or (None,) * sizes.layers,
            dtype=declared_dtype(config) or "float32",
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            experts=sizes.experts,
            experts_per_token=sizes.experts_per_token,
            renormalize=family != "qwen3_moe" or bool(config.get("norm_topk_prob", False)),
            layer_linears=tuple(_linears(sizes.blocks, fused=fused, stacked=stacked)),
            layer_vectors=tuple(_vectors(sizes.blocks)),
            attention_scale=float(scale) ** -0.5,
            attention_cap=caps.get("attn_logit"),
            logits_cap=caps.get("final_logit"),
            sparse=tuple(any(weight.is_expert for weight in block.weights) for block in sizes.blocks),
            fused=fused,
            stacked=stacked,
        )

    def linears(self) -> Iterator[LinearShape]:
        """Yield the linear layers of the blocks, without the output projection and stacked experts."""
        yield from self.layer_linears

    def stacked_experts(self) -> Iterator[LinearShape]:
        """Yield one expert's shape of each tensor that holds all experts of a layer, where they are `stacked`."""
        for layer, sparse in enumerate(self.sparse if self.stacked else ()):
            if sparse:
                place, inner = f"model.layers.{layer}.mlp.experts.", self.intermediate
                yield LinearShape(f"{place}gate_up_proj", 2 * inner, self.hidden, True)
                yield LinearShape(f"{place}down_proj", self.hidden, inner, True)

    def output_projection(self) -> LinearShape:
        """`lm_head`; its weight is the embedding's where `tied`."""
        return LinearShape("lm_head", self.vocab, self.hidden, False)

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Yield name and size of every norm's weight, and of what else has one dimension and is no bias."""
        yield from self.layer_vectors
        yield "model.norm.weight", self.hidden

    @property
    def embedding(self) -> str:
        """Name of the embedding's tensor."""
        return "model.embed_tokens.weight"


# Where config.json says nothing of them, what transformers 5.14 takes.
_CAPS: Mapping[str, Mapping[str, float | None]] = {
    "gemma2": {"attn_logit": 50.0, "final_logit": 30.0},
    "gemma3": {"attn_logit": None, "final_logit": None},
}


def _linears(blocks: tuple[Block, ...], *, fused: bool, stacked: bool) -> Iterator[LinearShape]:
    """Yield the linear layers of blocks, as they are stored."""
    for block in blocks:
        names = {weight.name for weight in block.weights}
        shapes = [
            LinearShape(
                f"model.{weight.name}",
                weight.rows,
                weight.columns,
                f"{weight.name}.bias" in names,
                router=router,
            )
            for weight in block.weights
            if weight.columns > 1 and not (stacked and weight.is_expert)
            for router in (weight.kind == "experts" and weight.name.endswith(_ROUTERS),)
        ]
        copies = {f"model.{weight.name}": weight.copies for weight in block.weights}
        if fused:
            shapes = [*_fused(shapes)]
        for shape in shapes:
            before, place, after = shape.name.partition(".experts.0.")
            if not place:
                yield from (shape for _ in range(copies.get(shape.name, 1)))
                continue
            for index in range(copies.get(shape.name, 1)):
                name = f"{before}.experts.{index}.{after}"
                yield LinearShape(name, shape.rows, shape.columns, shape.bias, shape.router)


def _fused(shapes: list[LinearShape]) -> Iterator[LinearShape]:
    """Yield the layers of a block of which q, k and v are one, and gate and up, too."""
    query, key, value, output, gate, up, down = shapes
    rows = query.rows + key.rows + value.rows
    yield replace(query, name=query.name.replace("q_proj", "qkv_proj"), rows=rows)
    yield output
    yield replace(gate, name=gate.name.replace("gate_proj", "gate_up_proj"), rows=gate.rows + up.rows)
    yield down


def _vectors(blocks: tuple[Block, ...]) -> Iterator[tuple[str, int]]:
    """Yield name and size of what has one dimension in blocks and is no bias: norms and sinks."""
    for weight in (weight for block in blocks for weight in block.weights):
        if weight.columns == 1 and not weight.name.endswith(".bias"):
            yield f"model.{weight.name}{'.weight' if weight.kind == 'norms' else ''}", weight.rows


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
    "query_pre_attn_scalar": (int, float),
    "attn_logit_softcapping": (int, float),
    "final_logit_softcapping": (int, float),
    "norm_topk_prob": bool,
    "rope_local_base_freq": (int, float),
    "original_max_position_embeddings": int,
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
    family = FAMILIES[names[0]]
    wrong = list(_size_faults(config))
    yield from wrong
    act, wanted = ("hidden_activation", "gelu_pytorch_tanh") if family in _GEMMA else ("hidden_act", "silu")
    if config.get(act, wanted) != wanted:
        yield Fault("is not supported", key=act, value=config[act], fix=wanted)
    experts = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "qwen3_moe": "num_experts"}
    counted = experts.get(family)
    if counted and not config.get(counted):
        yield Fault("must be a positive number", key=counted, value=config.get(counted))
    for key, plain in (("num_experts", 0), ("num_local_experts", 0), ("pretraining_tp", 1)):
        if config.get(key) not in (None, 0, plain) and key != counted:
            yield Fault("is not supported", key=key, value=config[key])
    if config.get("use_bidirectional_attention") not in (None, False):
        yield Fault("is not supported", key="use_bidirectional_attention", value=True, fix="false")
    if config.get("swiglu_limit") not in (None, 7.0):
        yield Fault("is not supported", key="swiglu_limit", value=config["swiglu_limit"], fix="7.0")
    if family == "gpt_oss" and not (config.get("rope_parameters") or config.get("rope_scaling")):
        yield Fault("is missing", key="rope_scaling")
    if not wrong:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        yield from rope_faults(config, head_dim, is_partial=family == "phi3")
        if family == "gemma3":
            yield from rope_faults(config, head_dim, layers=WINDOWED)


def _size_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    for key in _REQUIRED:
        value, most = config.get(key), MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            yield Fault(f"must be a positive number of at most {most}", key=key, value=value)
    for key, kind in _KINDS.items():
        if config.get(key) is not None and not isinstance(config[key], kind):
            yield Fault("is of another kind than it should be", key=key, value=config[key])
