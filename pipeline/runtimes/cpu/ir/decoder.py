"""Decoder: embedding, layers and head as one stateful OpenVINO model.

Inputs: input_ids [batch, tokens], attention_mask [batch, context], position_ids [batch, tokens] (i64), beam_idx
[batch] (i32). Outputs: logits [batch, tokens, vocab] f32, and where weights are integers the same by an output
projection in 8 bits (`LOGITS`). Keys and values are the state of the model.

`Decoder` is Llama, Mistral and dense Qwen. Another family is a file in `families` with a class derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino import Type
from openvino.op import util
from openvino.utils.node_factory import NodeFactory

from pipeline.models import Architecture, Rope
from pipeline.progress import Task
from pipeline.runtimes.cpu.engine.capped_attention import CAPPED
from pipeline.runtimes.cpu.engine.paged_model import LOGITS, LONG
from pipeline.runtimes.cpu.ir.nodes import (
    Node,
    f32,
    i64,
    name_nodes,
    parameter,
    parts,
    rms_norm,
    split_heads,
    swap_heads,
)
from pipeline.runtimes.cpu.ir.weights import Weights


class Decoder:
    """Llama's decoder; other families override what differs."""

    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        """`weights` own the memory that the model points into."""
        self.arch, self.weights = architecture, weights
        self.inputs = Inputs.make()
        self.attention = Attention(self.inputs, architecture)
        tables = rope_tables(self.inputs.position_ids, architecture.rope, architecture)
        local = architecture.local_rope
        near = tables if local is None else rope_tables(self.inputs.position_ids, local, architecture)
        self._tables = [tables if window is None else near for window in architecture.windows]

    def build(self, task: Task) -> ov.Model:
        """Build the model; `task` advances by one a layer."""
        hidden = self.embed()
        for layer in range(self.arch.layers):
            hidden = self.block(hidden, layer)
            task.advance()
        hidden = self.norm(hidden, "model.norm")
        results = []
        for name, projected in zip(LOGITS, self.weights.heads(hidden), strict=False):
            logits = self.capped(projected)
            logits.output(0).get_tensor().set_names({name})
            results.append(ops.result(logits))
            results[-1].set_friendly_name(name)
        model = ov.Model(results, self.attention.assignments, self.inputs.parameters, self.arch.class_name)
        name_nodes(model)
        return model

    def embed(self) -> Node:
        """[batch, tokens, hidden]: embeddings of the tokens."""
        return self.weights.embed(self.inputs.input_ids)

    def block(self, hidden: Node, layer: int) -> Node:
        """[batch, tokens, hidden] -> the same, through one layer."""
        block = f"model.layers.{layer}."
        mixed = self.attend(self.norm(hidden, block + "input_layernorm"), layer)
        hidden = ops.add(hidden, mixed)
        forward = self.feed_forward(self.norm(hidden, block + "post_attention_layernorm"), layer)
        return ops.add(hidden, forward)

    def attend(self, x: Node, layer: int) -> Node:
        """[batch, tokens, hidden] -> the same."""
        arch, name = self.arch, f"model.layers.{layer}.self_attn."
        heads = (arch.heads, arch.kv_heads, arch.kv_heads)
        query, key, value = (
            split_heads(part, count, arch.head_dim)
            for part, count in zip(self.projections(x, name), heads, strict=True)
        )
        if arch.qk_norm:
            query, key = self.norm(query, name + "q_norm"), self.norm(key, name + "k_norm")
        query, key = (rotate(swap_heads(part), *self._tables[layer], arch) for part in (query, key))
        key, value = self.weights.cached(layer, key, swap_heads(value))
        mixed = self.attention.attend(layer, query, key, value, self.sinks(name))
        return self.weights.linear(mixed, name + "o_proj")

    def projections(self, x: Node, name: str) -> list[Node]:
        """Queries, keys and values, [batch, tokens, (kv_)heads * head_dim]."""
        return self.weights.joined(x, name, ("q_proj", "k_proj", "v_proj"), "qkv_proj")

    def sinks(self, name: str) -> Node | None:  # noqa: ARG002
        """[1, heads, 1, 1]: a score of each head that no key has; None where there is none."""
        return None

    def feed_forward(self, x: Node, layer: int) -> Node:
        """[batch, tokens, hidden] -> the same."""
        name = f"model.layers.{layer}.mlp."
        gate, up = self.weights.joined(x, name, ("gate_proj", "up_proj"), "gate_up_proj")
        return self.weights.linear(ops.multiply(self.activate(gate), up), name + "down_proj")

    def activate(self, x: Node) -> Node:
        """Activation of gates: SiLU without a factor, which `ops.swish` adds and the pattern of experts lacks."""
        return NodeFactory("opset4").create("Swish", [x], {})

    def norm(self, x: Node, name: str) -> Node:
        """RMS norm over the last axis."""
        return rms_norm(x, self.weights.vector(f"{name}.weight"), self.arch.norm_epsilon)

    def capped(self, logits: Node) -> Node:
        """Apply the family's soft cap to logits."""
        return logits if self.arch.logits_cap is None else capped(logits, self.arch.logits_cap)


def capped(x: Node, cap: float) -> Node:
    """cap * tanh(x / cap)."""
    return ops.multiply(ops.tanh(ops.multiply(x, f32(1 / cap))), f32(cap))


MASKED = -65504.0  # the score of a key that must not be seen


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of the model, and the sizes that follow from them."""

    input_ids: Node  # [batch, tokens] i64
    attention_mask: Node  # [batch, context] i64
    position_ids: Node  # [batch, tokens] i64
    beam_idx: Node  # [batch] i32
    batch: Node  # [1] i64
    tokens: Node  # scalar i64: tokens of this call
    context: Node  # scalar i64: tokens before it, and its own

    @classmethod
    def make(cls) -> Inputs:
        """The four inputs of a stateful model, batch and lengths free."""
        input_ids = parameter("input_ids", [-1, -1], Type.i64)
        attention_mask = parameter("attention_mask", [-1, -1], Type.i64)
        shape = ops.shape_of(input_ids, Type.i64)
        return cls(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=parameter("position_ids", [-1, -1], Type.i64),
            beam_idx=parameter("beam_idx", [-1], Type.i32),
            batch=ops.gather(shape, i64([0]), i64(0)),
            tokens=ops.gather(shape, i64(1), i64(0)),
            context=ops.gather(ops.shape_of(attention_mask, Type.i64), i64(1), i64(0)),
        )

    @property
    def parameters(self) -> list[Node]:
        return [self.input_ids, self.attention_mask, self.position_ids, self.beam_idx]


def causal_mask(inputs: Inputs, window: int | None) -> Node:
    """[batch, 1, tokens, context] f32: 0 where query q may see key k, else MASKED.

    It may where k <= q, and q - window < k if there is a window.
    """
    keys = ops.unsqueeze(ops.range(i64(0), inputs.context, i64(1), Type.i64), i64([0, 1, 2]))
    first = ops.subtract(inputs.context, inputs.tokens)
    queries = ops.unsqueeze(ops.range(first, inputs.context, i64(1), Type.i64), i64([0, 1, 3]))
    causal = ops.less_equal(keys, queries)
    present = ops.greater(ops.unsqueeze(inputs.attention_mask, i64([1, 2])), i64(0))
    if window is None:
        return ops.select(ops.logical_and(causal, present), f32(0.0), f32(MASKED))
    near = ops.greater(keys, ops.add(queries, i64(-window)))
    # Said twice over, because the pattern wants four conjunctions.
    visible = ops.bitwise_and(causal, ops.bitwise_and(ops.bitwise_and(causal, near), present))
    visible = ops.bitwise_and(visible, present)
    tokens, context = ops.unsqueeze(inputs.tokens, i64(0)), ops.unsqueeze(inputs.context, i64(0))
    shape = ops.concat([inputs.batch, i64([1]), tokens, context], 0)
    scores = ops.select(ops.broadcast(visible, shape), f32(0.0), f32(MASKED))
    return ops.slice(scores, i64([0]), context, i64([1]), i64([3]))


class Attention:
    """The attention of all layers: the masks that they share, and the state that they keep."""

    def __init__(self, inputs: Inputs, architecture: Architecture) -> None:
        self._inputs, self._arch = inputs, architecture
        self._masks = {window: causal_mask(inputs, window) for window in dict.fromkeys(architecture.windows)}
        self.assignments: list[Node] = []  # they write the state back

    def attend(self, layer: int, query: Node, key: Node, value: Node, sinks: Node | None) -> Node:
        """query, key, value [batch, (kv_)heads, tokens, head_dim] -> [batch, tokens, heads * head_dim]."""
        arch = self._arch
        keys, values = self._append(layer, "key", key), self._append(layer, "value", value)
        mask, scale = self._masks[arch.windows[layer]], f32(arch.attention_scale)
        if arch.attention_cap is None:
            inputs = [query, keys, values, mask, scale, *([] if sinks is None else [sinks])]
            mixed = NodeFactory("opset13").create("ScaledDotProductAttention", inputs, {"causal": False})
        else:
            mixed = _capped_attention(query, keys, values, mask, scale, arch.attention_cap)
            mixed.set_friendly_name(f"{CAPPED}{layer}")
        return ops.reshape(swap_heads(mixed), i64([0, 0, arch.heads * arch.head_dim]), special_zero=True)

    def _append(self, layer: int, kind: str, current: Node) -> Node:
        """current [batch, kv_heads, tokens, head_dim] -> [batch, heads, context, head_dim]: all so far."""
        heads, kv_heads, head_dim = self._arch.heads, self._arch.kv_heads, self._arch.head_dim
        info = util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, kv_heads, -1, head_dim])
        info.data_type = Type.f32
        info.variable_id = f"past_key_values.{layer}.{kind}present.{layer}.{kind}"
        variable = util.Variable(info)
        empty = ops.broadcast(f32(0.0), ops.concat([self._inputs.batch, i64([kv_heads, 0, head_dim])], 0))
        past = ops.gather(ops.read_value(empty, variable), self._inputs.beam_idx, i64(0))
        everything = ops.concat([past, current], 2)
        self.assignments.append(ops.assign(everything, variable))
        repeats = i64([1, 1, heads // kv_heads, 1, 1])
        grouped = ops.broadcast(ops.unsqueeze(everything, i64(2)), repeats, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(grouped, i64([0, heads, -1, head_dim]), special_zero=True)


def _capped_attention(query: Node, keys: Node, values: Node, mask: Node, scale: Node, cap: float) -> Node:
    """Attention whose scores are capped, which no operation of OpenVINO has: the engine takes it apart again."""
    scores = capped(ops.multiply(ops.matmul(query, keys, False, True), scale), cap)
    return ops.matmul(ops.softmax(ops.add(scores, mask), -1), values, False, False)


def rope_tables(position_ids: Node, rope: Rope, architecture: Architecture) -> tuple[Node, Node]:
    """position_ids [batch, tokens] -> cosine and sine, each [batch, 1, tokens, channels that turn]."""
    positions = ops.unsqueeze(ops.convert(position_ids, Type.f32), i64(2))
    inverse = _inverse(rope, architecture.head_dim, long=False)
    if rope.kind == "longrope":
        long = ops.constant(np.array(False))
        long.set_friendly_name(LONG)
        inverse = ops.select(long, _inverse(rope, architecture.head_dim, long=True), inverse)
    angles = ops.multiply(positions, inverse)
    both_halves = ops.concat([angles, angles], -1)
    turns = (ops.unsqueeze(part, i64(1)) for part in (ops.cos(both_halves), ops.sin(both_halves)))
    if (factor := rope.attention_factor) != 1:
        turns = (ops.multiply(part, f32(factor)) for part in turns)
    cosine, sine = turns
    return cosine, sine


def _inverse(rope: Rope, head_dim: int, *, long: bool) -> Node:
    return f32(rope.inverse_frequencies(head_dim, long=long).reshape(1, 1, -1))


def rotate(x: Node, cosine: Node, sine: Node, architecture: Architecture) -> Node:
    """x [batch, heads, tokens, head_dim], its first channels turned: x * cos + (-second half, first half) * sin."""
    head_dim, channels = architecture.head_dim, architecture.rope.channels(architecture.head_dim)
    if channels < head_dim:
        turning, still = parts(x, [channels, head_dim - channels])
        return ops.concat([_turn(turning, cosine, sine, channels), still], -1)
    return _turn(x, cosine, sine, head_dim)


def _turn(x: Node, cosine: Node, sine: Node, channels: int) -> Node:
    half, end = channels // 2, 2**31 - 1
    first = ops.slice(x, i64([0]), i64([half]), i64([1]), i64([3]))
    second = ops.slice(x, i64([half]), i64([end]), i64([1]), i64([3]))
    turned = ops.concat([ops.multiply(second, f32(-1.0)), first], -1)
    return ops.add(ops.multiply(x, cosine), ops.multiply(turned, sine))
