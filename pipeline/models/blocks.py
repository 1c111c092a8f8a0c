"""Parts that decoders are made of: the weights of a layer by name, and what the layer keeps of a sequence.

A layer is a `Block`, and blocks are added: `attention(…) + gated_mlp(…) + norms(…)`. Names are those of published
checkpoints within a layer ("self_attn.q_proj"), since quantization is told by name; `Block.at` puts the layer before
them. Nothing here knows of a family or of config.json (`pipeline.models.families`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["embedding", "attention", "mixers", "mlp", "experts", "lm_head", "norms", "vision", "mtp"]
KINDS: tuple[Kind, ...] = (
    "embedding", "attention", "mixers", "mlp", "experts", "lm_head", "norms", "vision", "mtp",
)  # fmt: skip
# How ranks share a matrix [rows, columns] = [outputs, inputs]:
#   rows, columns   evenly, the last ones padded
#   pairs           rows by whole KV heads, each copied where there are more ranks than heads
#   vocabulary      rows, padded to a multiple of the ranks
#   copy            every rank holds all of it
SplitKind = Literal["rows", "columns", "pairs", "vocabulary", "copy"]
GATED = ("gate_proj", "up_proj", "down_proj")
PLAIN = ("up_proj", "down_proj")
W123 = ("w1", "w3", "w2")  # gate, up and down, as Mixtral calls them
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A matrix, or with one column a vector; `copies` of it lie in each place (experts)."""

    kind: Kind
    rows: int
    columns: int
    split: SplitKind = "copy"
    quantizable: bool = False  # a linear layer, whose format a recipe may choose
    copies: int = 1
    name: str = ""  # of the first copy: "layers.3.mlp.experts.0.up_proj"
    heads: int = 1  # KV heads, of which a rank holds whole ones where `split` is "pairs"
    stored: str = "none"  # format in which it is published
    group: int = 0  # columns that share a scale in that format; 0: as the format says

    @property
    def parameters(self) -> int:
        """Numbers in all copies."""
        return self.rows * self.columns * self.copies

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to the routed experts, of which a token passes a few."""
        return self.copies > 1

    def at(self, place: str) -> WeightTensor:
        """Put a place before its name; there are thousands in a model, and `replace` takes four times as long."""
        return WeightTensor(
            self.kind, self.rows, self.columns, self.split, self.quantizable, self.copies, place + self.name,
            self.heads, self.stored, self.group,
        )  # fmt: skip

    def published_in(self, stored: str, group: int) -> WeightTensor:
        """Give it the format in which it is published."""
        return WeightTensor(
            self.kind, self.rows, self.columns, self.split, self.quantizable, self.copies, self.name, self.heads,
            stored, group,
        )  # fmt: skip


CacheKind = Literal[
    "full attention", "sliding window", "chunked attention", "latent attention", "sparse index", "compressed",
    "linear attention", "mamba",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cache:
    """Memory of a sequence in a layer: numbers for each token, or a state of a fixed size.

    Attributes:
        numbers: For each token that is kept, in all heads.
        heads: KV heads that ranks share; 0: every rank keeps all of it.
        window: Tokens that are kept at most; 0: all.
        every: Tokens that share one entry.
        is_bounded: Whether servers keep no more than the window. Those that keep all count it as any other.
        state: Bytes, whatever the length of the sequence; ranks share them.
        recurrent: Numbers of the recurrent state in them, whose type a server may choose.
        recurrent_dtype: Type that `state` counts them in.
        bytes_each: Bytes of a number; 0: as the KV cache's type says.
    """

    kind: CacheKind
    numbers: int = 0
    heads: int = 0
    window: int = 0
    every: int = 1
    is_bounded: bool = False
    state: int = 0
    recurrent: int = 0
    recurrent_dtype: str = "float32"
    bytes_each: float = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A layer, or a part of a layer."""

    weights: tuple[WeightTensor, ...] = ()
    caches: tuple[Cache, ...] = ()

    def __add__(self, other: Block) -> Block:
        """Join two parts."""
        return Block(self.weights + other.weights, self.caches + other.caches)

    def at(self, place: str) -> Block:
        """Put a place before all names: "layers.3."."""
        return Block(tuple(weight.at(place) for weight in self.weights), self.caches)

    def as_kind(self, kind: Kind) -> tuple[WeightTensor, ...]:
        """Return the weights as those of another kind; experts stay recognizable by their copies."""
        return tuple(replace(weight, kind=kind) for weight in self.weights)

    def whole(self) -> Block:
        """Return the same part as every rank holds it whole."""
        return Block(tuple(replace(weight, split="copy") for weight in self.weights), self.caches)


def linear(
    kind: Kind, name: str, rows: int, columns: int, split: SplitKind = "copy", *, bias: bool = False
) -> tuple[WeightTensor, ...]:
    """Make a linear layer; the bias of a layer that is split by columns lies whole on every rank."""
    weight = WeightTensor(kind, rows, columns, split, quantizable=True, name=name)
    if not bias:
        return (weight,)
    return weight, vector(kind, f"{name}.bias", rows, "rows" if split == "rows" else "copy")


def vector(kind: Kind, name: str, rows: int, split: SplitKind = "copy") -> WeightTensor:
    """Make a vector, which is never quantized."""
    return WeightTensor(kind, rows, 1, split, name=name)


def norms(size: int, *names: str, bias: bool = False) -> Block:
    """Norms of one size."""
    parts = [vector("norms", name, size) for name in names]
    return Block(tuple(parts + [vector("norms", f"{name}.bias", size) for name in names if bias]))


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    value_dim: int = 0,
    bias: bool = False,
    output_bias: bool = False,
    norm: Literal["", "head", "all"] = "",
    gate: bool = False,
    sinks: bool = False,
    keys_are_values: bool = False,
    window: int = 0,
    chunk: int = 0,
    name: str = "self_attn",
    projections: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    inputs: int = 0,
) -> Block:
    """Attention with keys and values for each KV head.

    Args:
        value_dim: Size of a value's head where it is another than the key's.
        bias: On queries, keys and values.
        norm: RMS norm of queries and keys, over each head or over all of them.
        gate: Whether queries bring a gate of their own size.
        sinks: Whether each head has a learned logit.
        keys_are_values: Whether values are made of the keys' projection.
        window: Tokens that the layer sees; 0: all.
        chunk: Tokens of a chunk, within which the layer sees; 0: no chunks.
        inputs: Columns of the first projections; 0: `hidden`.
    """
    value_dim, inputs = value_dim or head_dim, inputs or hidden
    q, k, v, o = (f"{name}.{projection}" for projection in projections)
    pairs = [(k, head_dim)] if keys_are_values else [(k, head_dim), (v, value_dim)]
    weights = list(linear("attention", q, heads * head_dim * (2 if gate else 1), inputs, "rows", bias=bias))
    for pair, size in pairs:
        rows = kv_heads * size
        weights.append(WeightTensor("attention", rows, inputs, "pairs", True, name=pair, heads=kv_heads))
        if bias:
            weights.append(WeightTensor("attention", rows, 1, "pairs", name=f"{pair}.bias", heads=kv_heads))
    weights += linear("attention", o, hidden, heads * value_dim, "columns", bias=output_bias)
    if norm:
        sizes = (1, 1) if norm == "head" else (heads, kv_heads)
        weights += [
            vector("norms", f"{name}.{letter}_norm", count * head_dim)
            for letter, count in zip("qk", sizes, strict=True)
        ]
    if sinks:
        weights.append(vector("attention", f"{name}.sinks", heads, "rows"))
    kind: CacheKind = "sliding window" if window else "chunked attention" if chunk else "full attention"
    cache = Cache(kind, kv_heads * (head_dim + value_dim), kv_heads, window or chunk)
    return Block(tuple(weights), (cache,))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek V2, V3): the cache holds one compressed vector a token for all heads."""

    kv_rank: int  # kv_lora_rank
    rope: int  # qk_rope_head_dim
    nope: int  # qk_nope_head_dim
    value: int  # v_head_dim
    query_rank: int = 0  # q_lora_rank; 0: queries are not compressed


def latent_attention(
    hidden: int, heads: int, latent: LatentAttention, *, bias: bool = False, gate: bool = False
) -> Block:
    """Multi-head latent attention; `gate` adds one of the outputs' size, `bias` is on the compressing projections."""
    name, weights = "self_attn", list[WeightTensor]()
    queries = heads * (latent.nope + latent.rope)
    if latent.query_rank:
        weights += linear("attention", f"{name}.q_a_proj", latent.query_rank, hidden, bias=bias)
        weights.append(vector("norms", f"{name}.q_a_layernorm", latent.query_rank))
        weights += linear("attention", f"{name}.q_b_proj", queries, latent.query_rank, "rows")
    else:
        weights += linear("attention", f"{name}.q_proj", queries, hidden, "rows")
    compressed = latent.kv_rank + latent.rope
    weights += linear("attention", f"{name}.kv_a_proj_with_mqa", compressed, hidden, bias=bias)
    weights.append(vector("norms", f"{name}.kv_a_layernorm", latent.kv_rank))
    expanded = heads * (latent.nope + latent.value)
    weights += linear("attention", f"{name}.kv_b_proj", expanded, latent.kv_rank, "rows")
    weights += linear("attention", f"{name}.o_proj", hidden, heads * latent.value, "columns", bias=bias)
    if gate:
        weights += linear("attention", f"{name}.g_proj", heads * latent.value, hidden, "rows")
    return Block(tuple(weights), (Cache("latent attention", compressed),))


def sparse_index(hidden: int, query_rank: int, heads: int, head_dim: int) -> Block:
    """Indexer of DeepSeek sparse attention, by which each query chooses the tokens that it sees.

    Its keys are kept in FP8 with one 32-bit scale for 128 of them, whatever the KV cache's type (deepseek-ai
    DeepSeek-V3.2 and TensorRT-LLM's `DSACacheManager`).
    """
    name = "self_attn.indexer"
    weights = (
        *linear("attention", f"{name}.wq_b", heads * head_dim, query_rank),
        *linear("attention", f"{name}.wk", head_dim, hidden),
        *norms(head_dim, f"{name}.k_norm", bias=True).weights,
        WeightTensor("attention", heads, hidden, name=f"{name}.weights_proj"),
    )
    return Block(weights, (Cache("sparse index", head_dim, bytes_each=1 + 4 / 128),))


def feed_forward(
    hidden: int,
    inner: int,
    *,
    name: str = "mlp",
    kind: Kind = "mlp",
    bias: bool = False,
    projections: Sequence[str] = GATED,
    copies: int = 1,
) -> Block:
    """A feed-forward: the last of its projections goes back to `hidden`. With `copies`, so many routed experts."""
    weights: list[WeightTensor] = []
    for projection in projections[:-1]:
        weights += linear(kind, f"{name}.{projection}", inner, hidden, "rows", bias=bias)
    weights += linear(kind, f"{name}.{projections[-1]}", hidden, inner, "columns", bias=bias)
    return Block(
        tuple(replace(weight, copies=copies) for weight in weights) if copies > 1 else tuple(weights)
    )


def experts(
    hidden: int,
    inner: int,
    count: int,
    *,
    name: str = "mlp",
    router: str = "gate",
    router_bias: bool = False,
    score_bias: bool = False,
    score_name: str = "",
    bias: bool = False,
    projections: Sequence[str] = GATED,
    shared: int = 0,
    shared_name: str = "shared_experts",
    shared_gate: bool = False,
    latent: int = 0,
) -> Block:
    """Routed experts with their router, and the shared ones.

    Args:
        inner: Size of one expert.
        score_bias: Whether the router chooses by a number for each expert.
        score_name: Name of these numbers; "": e_score_correction_bias of the router.
        bias: On each expert.
        shared: Inner size of the experts that every token passes, together; 0: none.
        shared_gate: Whether a gate weighs those.
        latent: Size of the space in which experts work; 0: `hidden`.
    """
    weights = [WeightTensor("experts", count, hidden, name=f"{name}.{router}")]
    if router_bias:
        weights.append(vector("experts", f"{name}.{router}.bias", count))
    if score_bias:
        scores = score_name or f"{router}.e_score_correction_bias"
        weights.append(vector("experts", f"{name}.{scores}", count))
    routed = feed_forward(
        latent or hidden, inner, name=f"{name}.experts.0", kind="experts", bias=bias, projections=projections,
        copies=count,
    )  # fmt: skip
    weights += routed.weights
    if shared:
        inside = feed_forward(
            hidden, shared, name=f"{name}.{shared_name}", kind="experts", projections=projections
        )
        weights += inside.weights
    if shared_gate:
        weights.append(WeightTensor("experts", 1, hidden, name=f"{name}.shared_expert_gate"))
    return Block(tuple(weights))


def mamba(
    hidden: int, heads: int, head_dim: int, groups: int, state: int, kernel: int, *, name: str = "mixer",
    bias: bool = False, conv_bias: bool = True, norm: bool = True, state_dtype: str = "float32",
    dtype: str = "bfloat16",
) -> Block:  # fmt: skip
    """A Mamba-2 mixer: of a sequence it keeps the inputs of its convolution and one state for each head.

    Args:
        state: Size of a head's state for each of its channels.
    """
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    weights = (
        *linear("mixers", f"{name}.in_proj", inner + channels + heads, hidden, "rows", bias=bias),
        WeightTensor("mixers", channels, kernel, "rows", name=f"{name}.conv1d"),
        *((vector("mixers", f"{name}.conv1d.bias", channels, "rows"),) if conv_bias else ()),
        *(vector("mixers", f"{name}.{part}", heads, "rows") for part in ("dt_bias", "A_log", "D")),
        *((vector("norms", f"{name}.norm", inner, "rows"),) if norm else ()),
        *linear("mixers", f"{name}.out_proj", hidden, inner, "columns", bias=bias),
    )
    state_bytes = channels * (kernel - 1) * STATE_BYTES[dtype] + inner * state * STATE_BYTES[state_dtype]
    cache = Cache(
        "mamba", heads=heads, state=state_bytes, recurrent=inner * state, recurrent_dtype=state_dtype
    )
    return Block(weights, (cache,))


def delta_net(
    hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int, *,
    inputs: Iterable[tuple[str, int, bool]], state_dtype: str = "float32", dtype: str = "bfloat16",
) -> Block:  # fmt: skip
    """Linear attention by the gated delta rule: of a sequence it keeps a matrix for each head, and the convolution's.

    Args:
        inputs: Name and rows of each projection of the inputs, and whether it is large enough to be quantized.
    """
    name = "linear_attn"
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    weights = [
        WeightTensor("mixers", rows, hidden, "rows", quantizable, name=f"{name}.{projection}")
        for projection, rows, quantizable in inputs
    ]
    weights += (
        WeightTensor("mixers", channels, kernel, "rows", name=f"{name}.conv1d"),
        vector("mixers", f"{name}.dt_bias", value_heads, "rows"),
        vector("mixers", f"{name}.A_log", value_heads, "rows"),
        vector("norms", f"{name}.norm", value_dim),
        *linear("mixers", f"{name}.out_proj", hidden, value_heads * value_dim, "columns"),
    )
    matrices = value_heads * key_dim * value_dim
    state_bytes = channels * (kernel - 1) * STATE_BYTES[dtype] + matrices * STATE_BYTES[state_dtype]
    cache = Cache(
        "linear attention",
        heads=value_heads,
        state=state_bytes,
        recurrent=matrices,
        recurrent_dtype=state_dtype,
    )
    return Block(tuple(weights), (cache,))
