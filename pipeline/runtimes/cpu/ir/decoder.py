"""The decoder: embedding, layers and head as one stateful OpenVINO model.

Inputs: input_ids [batch, tokens], attention_mask [batch, context], position_ids [batch, tokens] (i64), beam_idx
[batch] (i32). Output: logits [batch, tokens, vocab] f32. Keys and values are the state of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import openvino as ov
import openvino.opset15 as ops
from openvino import Type
from openvino.op import util

from pipeline.models import Architecture
from pipeline.models.tensors import Array
from pipeline.progress import Task
from pipeline.runtimes.cpu.ir.weights import (
    Node,
    Weights,
    f32,
    i64,
    name_nodes,
    parameter,
    rms_norm,
    split_heads,
    swap_heads,
)


def decoder(architecture: Architecture, weights: Weights, task: Task) -> ov.Model:
    """The model; it points into the memory of `weights`. `task` advances by one a layer."""
    return _Decoder(architecture, weights).build(task)


class _Decoder:
    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self._arch, self._weights = architecture, weights
        self._inputs = Inputs.make()
        self._attention = Attention(self._inputs, architecture)
        inverse = architecture.rope.inverse_frequencies(architecture.head_dim)
        self._cosine, self._sine = tables(self._inputs.position_ids, inverse)

    def build(self, task: Task) -> ov.Model:
        hidden = self._weights.embed(self._inputs.input_ids)
        for layer in range(self._arch.layers):
            hidden = self._block(hidden, layer)
            task.advance()
        logits = self._weights.head(self._norm(hidden, "model.norm"))
        logits.output(0).get_tensor().set_names({"logits"})
        result = ops.result(logits)
        result.set_friendly_name("logits")
        model = ov.Model(
            [result], self._attention.assignments, self._inputs.parameters, self._arch.class_name
        )
        name_nodes(model)
        return model

    def _block(self, hidden: Node, layer: int) -> Node:
        block = f"model.layers.{layer}."
        mixed = self._attend(self._norm(hidden, block + "input_layernorm"), layer, block + "self_attn.")
        hidden = ops.add(hidden, mixed)
        forward = self._feed_forward(self._norm(hidden, block + "post_attention_layernorm"), block + "mlp.")
        return ops.add(hidden, forward)

    def _attend(self, x: Node, layer: int, name: str) -> Node:
        """[batch, tokens, hidden] -> the same."""
        arch = self._arch
        heads = (arch.heads, arch.kv_heads, arch.kv_heads)
        query, key, value = (
            split_heads(part, count, arch.head_dim)
            for part, count in zip(self._projections(x, name), heads, strict=True)
        )
        if arch.qk_norm:
            query, key = self._norm(query, name + "q_norm"), self._norm(key, name + "k_norm")
        query, key = self._rotate(swap_heads(query)), self._rotate(swap_heads(key))
        key, value = self._weights.cached(layer, key, swap_heads(value))
        return self._weights.linear(self._attention.attend(layer, query, key, value), name + "o_proj")

    def _projections(self, x: Node, name: str) -> list[Node]:
        """Queries, keys and values, [batch, tokens, (kv_)heads * head_dim]."""
        arch, linear = self._arch, self._weights.linear
        if not arch.fused:
            return [linear(x, f"{name}{part}_proj") for part in "qkv"]
        sizes = [count * arch.head_dim for count in (arch.heads, arch.kv_heads, arch.kv_heads)]
        return _parts(linear(x, name + "qkv_proj"), sizes)

    def _feed_forward(self, x: Node, name: str) -> Node:
        linear, inner = self._weights.linear, self._arch.intermediate
        if self._arch.fused:
            gate, up = _parts(linear(x, name + "gate_up_proj"), [inner, inner])
        else:
            gate, up = linear(x, name + "gate_proj"), linear(x, name + "up_proj")
        return linear(ops.multiply(ops.swish(gate), up), name + "down_proj")

    def _norm(self, x: Node, name: str) -> Node:
        return rms_norm(x, self._weights.norm(name), self._arch.norm_epsilon)

    def _rotate(self, x: Node) -> Node:
        return rotate(x, self._cosine, self._sine, self._arch.head_dim)


def _parts(x: Node, sizes: list[int]) -> list[Node]:
    """x [..., sum of sizes] divided along its last axis."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        ops.slice(x, i64([start]), i64([start + size]), i64([1]), i64([-1]))
        for start, size in zip(starts, sizes, strict=True)
    ]


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
    seen = ops.bitwise_and(causal, ops.bitwise_and(ops.bitwise_and(causal, near), present))
    seen = ops.bitwise_and(seen, present)
    tokens, context = ops.unsqueeze(inputs.tokens, i64(0)), ops.unsqueeze(inputs.context, i64(0))
    shape = ops.concat([inputs.batch, i64([1]), tokens, context], 0)
    scores = ops.select(ops.broadcast(seen, shape), f32(0.0), f32(MASKED))
    return ops.slice(scores, i64([0]), context, i64([1]), i64([3]))


class Attention:
    """The attention of all layers: the masks that they share, and the state that they keep."""

    def __init__(self, inputs: Inputs, architecture: Architecture) -> None:
        self._inputs, self._arch = inputs, architecture
        self._masks = {window: causal_mask(inputs, window) for window in dict.fromkeys(architecture.windows)}
        self.assignments: list[Node] = []  # they write the state back

    def attend(self, layer: int, query: Node, key: Node, value: Node) -> Node:
        """query, key, value [batch, (kv_)heads, tokens, head_dim] -> [batch, tokens, heads * head_dim]."""
        arch = self._arch
        keys, values = self._append(layer, "key", key), self._append(layer, "value", value)
        mask, scale = self._masks[arch.windows[layer]], f32(arch.head_dim**-0.5)
        mixed = ops.scaled_dot_product_attention(query, keys, values, mask, scale, causal=False)
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


def tables(position_ids: Node, inverse: Array) -> tuple[Node, Node]:
    """position_ids [batch, tokens] -> cosine and sine, each [batch, 1, tokens, head_dim]."""
    positions = ops.unsqueeze(ops.convert(position_ids, Type.f32), i64(2))
    angles = ops.multiply(positions, f32(inverse.reshape(1, 1, -1)))
    both_halves = ops.concat([angles, angles], -1)
    return ops.unsqueeze(ops.cos(both_halves), i64(1)), ops.unsqueeze(ops.sin(both_halves), i64(1))


def rotate(x: Node, cosine: Node, sine: Node, head_dim: int) -> Node:
    """x [batch, heads, tokens, head_dim], turned: x * cos + (-second half, first half) * sin."""
    half, end = head_dim // 2, 2**31 - 1
    first = ops.slice(x, i64([0]), i64([half]), i64([1]), i64([3]))
    second = ops.slice(x, i64([half]), i64([end]), i64([1]), i64([3]))
    turned = ops.concat([ops.multiply(second, f32(-1.0)), first], -1)
    return ops.add(ops.multiply(x, cosine), ops.multiply(turned, sine))
