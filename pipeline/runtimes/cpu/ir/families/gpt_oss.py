"""gpt-oss: sinks in the attention, biases everywhere, and experts in one tensor a layer, as published in MXFP4.

MXFP4 weights stay as whole numbers of 8 bits with a scale for each 32 columns, which is exact.
"""

from __future__ import annotations

import openvino.opset15 as ops

from pipeline.runtimes.cpu.ir.decoder import Decoder
from pipeline.runtimes.cpu.ir.experts import route, routed
from pipeline.runtimes.cpu.ir.nodes import Node, f32, i64

ALPHA, LIMIT = 1.702, 7.0  # transformers 5.14, models/gpt_oss/modeling_gpt_oss.py: GptOssExperts


class GptOss(Decoder):
    """gpt-oss."""

    def sinks(self, name: str) -> Node | None:
        """[1, heads, 1, 1]: a score of each head that no key has."""
        return f32(self.weights.values(f"{name}sinks").reshape(1, -1, 1, 1))

    def feed_forward(self, x: Node, layer: int) -> Node:
        """[batch, tokens, hidden] -> the same."""
        name, count = f"model.layers.{layer}.mlp.", self.arch.experts
        upper, upper_bias = self.weights.stacked(f"{name}experts.gate_up_proj")
        lower, lower_bias = self.weights.stacked(f"{name}experts.down_proj")

        def each(x: Node) -> Node:
            both = ops.add(ops.matmul(x, upper, False, True), upper_bias)
            # Gates are the even columns, the others the odd ones.
            gate, up = (ops.slice(both, i64([at]), i64([2**31 - 1]), i64([2]), i64([-1])) for at in (0, 1))
            scaled = ops.add(ops.clamp(up, -LIMIT, LIMIT), f32(1.0))
            gated = ops.multiply(scaled, ops.swish(ops.minimum(gate, f32(LIMIT)), f32(ALPHA)))
            return ops.add(ops.matmul(gated, lower, False, True), lower_bias)

        logits = ops.reshape(self.weights.router(x, name + "router"), i64([-1, count]), special_zero=False)
        shares, chosen = route(logits, self.arch.experts_per_token, renormalize=True)
        return routed(x, count, shares, chosen, each)
