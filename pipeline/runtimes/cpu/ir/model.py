"""The decoder: embedding, layers and head as one stateful OpenVINO model.

Inputs: input_ids [batch, tokens], attention_mask [batch, context], position_ids [batch, tokens] (i64), beam_idx
[batch] (i32). Output: logits [batch, tokens, vocab] f32. Keys and values are the state of the model.
"""

from __future__ import annotations

import openvino as ov
import openvino.opset15 as ops

from pipeline.models import Architecture
from pipeline.progress import Task
from pipeline.runtimes.cpu.ir import rope
from pipeline.runtimes.cpu.ir.attention import Attention, Inputs
from pipeline.runtimes.cpu.ir.nodes import Node, i64, name_nodes, rms_norm, split_heads, swap_heads
from pipeline.runtimes.cpu.ir.weights import Weights


def decoder(architecture: Architecture, weights: Weights, task: Task) -> ov.Model:
    """The model; it points into the memory of `weights`. `task` advances by one a layer."""
    return _Decoder(architecture, weights).build(task)


class _Decoder:
    def __init__(self, architecture: Architecture, weights: Weights) -> None:
        self._arch, self._weights = architecture, weights
        self._inputs = Inputs.make()
        self._attention = Attention(self._inputs, architecture)
        inverse = rope.inverse_frequencies(architecture.rope, architecture.head_dim)
        self._cosine, self._sine = rope.tables(self._inputs.position_ids, inverse)

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
        return rope.rotate(x, self._cosine, self._sine, self._arch.head_dim)


def _parts(x: Node, sizes: list[int]) -> list[Node]:
    """x [..., sum of sizes] divided along its last axis."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        ops.slice(x, i64([start]), i64([start + size]), i64([1]), i64([-1]))
        for start, size in zip(starts, sizes, strict=True)
    ]
