"""The decoder: embedding, layers and head as one stateful OpenVINO model.

Inputs: input_ids [batch, tokens], attention_mask [batch, context], position_ids [batch, tokens] (i64), beam_idx
[batch] (i32). Output: logits [batch, tokens, vocab] f32. Keys and values are the state of the model.
"""

from __future__ import annotations

import openvino as ov
import openvino.opset15 as ops

from pipeline.checkpoint import Architecture
from pipeline.progress import Task
from pipeline.runtimes.cpu.ir import rope
from pipeline.runtimes.cpu.ir.attention import Attention, Inputs
from pipeline.runtimes.cpu.ir.nodes import Node, name_nodes, rms_norm, split_heads, swap_heads
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
        arch, linear = self._arch, self._weights.linear
        query = split_heads(linear(x, name + "q_proj"), arch.heads, arch.head_dim)
        key = split_heads(linear(x, name + "k_proj"), arch.kv_heads, arch.head_dim)
        value = split_heads(linear(x, name + "v_proj"), arch.kv_heads, arch.head_dim)
        if arch.qk_norm:
            query, key = self._norm(query, name + "q_norm"), self._norm(key, name + "k_norm")
        query, key = self._rotate(swap_heads(query)), self._rotate(swap_heads(key))
        key, value = self._weights.cached(layer, key, swap_heads(value))
        return linear(self._attention.attend(layer, query, key, value), name + "o_proj")

    def _feed_forward(self, x: Node, name: str) -> Node:
        linear = self._weights.linear
        gate = ops.swish(linear(x, name + "gate_proj"))
        return linear(ops.multiply(gate, linear(x, name + "up_proj")), name + "down_proj")

    def _norm(self, x: Node, name: str) -> Node:
        return rms_norm(x, self._weights.norm(name), self._arch.norm_epsilon)

    def _rotate(self, x: Node) -> Node:
        return rope.rotate(x, self._cosine, self._sine, self._arch.head_dim)
