"""Gemma 2 and 3 (text): norms before and behind each part, scaled embeddings, GELU; scores and logits may be capped.

Gemma 2 caps the scores of its attention, for which OpenVINO has no operation (`engine/capped_attention.py`). Gemma 3
norms queries and keys, and its windowed layers turn by a base of their own.
"""

from __future__ import annotations

import openvino.opset15 as ops

from pipeline.runtimes.cpu.ir.decoder import Decoder
from pipeline.runtimes.cpu.ir.nodes import Node, f32, rms_norm


class Gemma(Decoder):
    """Gemma 2 and 3."""

    def embed(self) -> Node:
        """[batch, tokens, hidden]: embeddings times the root of their size."""
        return ops.multiply(super().embed(), f32(self.arch.hidden**0.5))

    def block(self, hidden: Node, layer: int) -> Node:
        """[batch, tokens, hidden] -> the same, through one layer."""
        block = f"model.layers.{layer}."
        mixed = self.attend(self.norm(hidden, block + "input_layernorm"), layer)
        hidden = ops.add(hidden, self.norm(mixed, block + "post_attention_layernorm"))
        forward = self.feed_forward(self.norm(hidden, block + "pre_feedforward_layernorm"), layer)
        return ops.add(hidden, self.norm(forward, block + "post_feedforward_layernorm"))

    def norm(self, x: Node, name: str) -> Node:
        """RMS norm over the last axis, by 1 + weight."""
        weight = 1 + self.weights.values(f"{name}.weight")
        return rms_norm(x, f32(weight), self.arch.norm_epsilon)

    def activate(self, x: Node) -> Node:
        """GELU in its approximation by tanh."""
        return ops.gelu(x, "tanh")
