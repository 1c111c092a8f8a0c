"""Mixtral and Qwen3 MoE: a router and experts, each with tensors of its own, in place of the feed-forward."""

from __future__ import annotations

import openvino.opset15 as ops

from pipeline.runtimes.cpu.ir.decoder import Decoder
from pipeline.runtimes.cpu.ir.experts import route, routed
from pipeline.runtimes.cpu.ir.nodes import Node, i64


class Mixtral(Decoder):
    """Mixtral."""

    place = "block_sparse_moe."
    projections_of_experts = ("w1", "w3", "w2")  # gate, up, down

    def feed_forward(self, x: Node, layer: int) -> Node:
        """[batch, tokens, hidden] -> the same; some layers of Qwen are dense."""
        if not self.arch.sparse[layer]:
            return super().feed_forward(x, layer)
        name, count = f"model.layers.{layer}.{self.place}", self.arch.experts
        gate, up, down = (
            self.weights.experts([f"{name}experts.{index}.{projection}" for index in range(count)])
            for projection in self.projections_of_experts
        )

        def each(x: Node) -> Node:
            gated = ops.multiply(
                self.activate(ops.matmul(x, gate, False, True)), ops.matmul(x, up, False, True)
            )
            return ops.matmul(gated, down, False, True)

        logits = ops.reshape(self.weights.router(x, name + "gate"), i64([-1, count]), special_zero=False)
        shares, chosen = route(logits, self.arch.experts_per_token, renormalize=self.arch.renormalize)
        return routed(x, count, shares, chosen, each)


class Qwen3Moe(Mixtral):
    """Qwen3 MoE, whose heads are normed as in dense Qwen3."""

    place = "mlp."
    projections_of_experts = ("gate_proj", "up_proj", "down_proj")
