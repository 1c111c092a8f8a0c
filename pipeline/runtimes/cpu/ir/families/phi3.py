"""Phi-3 and Phi-4: one projection for queries, keys and values, and one for gate and up."""

from __future__ import annotations

import openvino.opset15 as ops

from pipeline.runtimes.cpu.ir.decoder import Decoder
from pipeline.runtimes.cpu.ir.nodes import Node, parts


class Phi3(Decoder):
    """Llama with joined projections."""

    def projections(self, x: Node, name: str) -> list[Node]:
        """Queries, keys and values, [batch, tokens, (kv_)heads * head_dim]."""
        sizes = [
            count * self.arch.head_dim for count in (self.arch.heads, self.arch.kv_heads, self.arch.kv_heads)
        ]
        return parts(self.weights.linear(x, name + "qkv_proj"), sizes)

    def feed_forward(self, x: Node, layer: int) -> Node:
        """[batch, tokens, hidden] -> the same."""
        name, inner = f"model.layers.{layer}.mlp.", self.arch.intermediate
        gate, up = parts(self.weights.linear(x, name + "gate_up_proj"), [inner, inner])
        return self.weights.linear(ops.multiply(self.activate(gate), up), name + "down_proj")
