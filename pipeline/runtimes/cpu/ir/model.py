"""The decoder: embedding, layers, head, as one stateful OpenVINO model.

Inputs: input_ids [batch, tokens], attention_mask [batch, context], position_ids [batch, tokens] (i64) and beam_idx
[batch] (i32). Output: logits [batch, tokens, vocab_size] f32. The keys and values are the state of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from pipeline.runtimes.cpu.ir import rope
from pipeline.runtimes.cpu.ir.attention import Inputs, KeyValueCache, attend, causal_mask
from pipeline.runtimes.cpu.ir.linear import plain
from pipeline.runtimes.cpu.ir.nodes import Node, i64, name_nodes, rms_norm, split_heads, to_heads_first


@dataclass(frozen=True, slots=True)
class Dimensions:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    epsilon: float
    theta: float
    rope_kind: str
    rope_scaling: dict[str, float]
    window: int | None
    tied: bool


class Decoder:
    """One model under construction."""

    def __init__(
        self, dims: Dimensions, take: Callable[[str], np.ndarray], has: Callable[[str], bool]
    ) -> None:
        self._dims, self._take, self._has = dims, take, has

    def build(self) -> ov.Model:
        dims, inputs = self._dims, Inputs.make()
        embedding = plain(self._take("model.embed_tokens.weight"), "model.embed_tokens.weight")
        hidden = ops.gather(embedding, ops.convert(inputs.input_ids, ov.Type.i32), i64(0))
        inverse = rope.inverse_frequencies(dims.head_dim, dims.theta, dims.rope_kind, dims.rope_scaling)
        cosine, sine = rope.tables(inputs.position_ids, inverse)
        mask = causal_mask(inputs, dims.window)
        cache = KeyValueCache(inputs, heads=dims.heads, kv_heads=dims.kv_heads, head_dim=dims.head_dim)
        for layer in range(dims.layers):
            prefix = f"model.layers.{layer}."
            attention = self._attention(prefix + "self_attn.", layer, self._norm(hidden, prefix + "input_layernorm"),
                                        cosine, sine, mask, cache)  # fmt: skip
            hidden = ops.add(hidden, attention)
            hidden = ops.add(
                hidden, self._mlp(prefix + "mlp.", self._norm(hidden, prefix + "post_attention_layernorm"))
            )
        hidden = self._norm(hidden, "model.norm")
        logits = ops.matmul(hidden, embedding, False, True) if dims.tied else self._linear(hidden, "lm_head")
        logits.output(0).get_tensor().set_names({"logits"})
        result = ops.result(logits)
        result.set_friendly_name("logits")
        model = ov.Model([result], cache.assignments, inputs.parameters, "decoder")
        name_nodes(model)
        return model

    def _norm(self, x: Node, name: str) -> Node:
        return rms_norm(x, plain(self._take(f"{name}.weight"), f"{name}.weight"), self._dims.epsilon)

    def _linear(self, x: Node, name: str) -> Node:
        y = ops.matmul(x, plain(self._take(f"{name}.weight"), f"{name}.weight"), False, True)
        return (
            ops.add(y, plain(self._take(f"{name}.bias"), f"{name}.bias")) if self._has(f"{name}.bias") else y
        )

    def _attention(self, prefix: str, layer: int, x: Node, cosine: Node, sine: Node, mask: Node,
                   cache: KeyValueCache) -> Node:  # fmt: skip
        dims = self._dims
        query = split_heads(self._linear(x, prefix + "q_proj"), dims.heads, dims.head_dim)
        key = split_heads(self._linear(x, prefix + "k_proj"), dims.kv_heads, dims.head_dim)
        value = split_heads(self._linear(x, prefix + "v_proj"), dims.kv_heads, dims.head_dim)
        if self._has(prefix + "q_norm.weight"):
            query, key = self._norm(query, prefix + "q_norm"), self._norm(key, prefix + "k_norm")
        query = rope.rotate(to_heads_first(query), cosine, sine, dims.head_dim)
        key = rope.rotate(to_heads_first(key), cosine, sine, dims.head_dim)
        keys = cache.append(layer, "key", key)
        values = cache.append(layer, "value", to_heads_first(value))
        mixed = attend(query, keys, values, mask, heads=dims.heads, head_dim=dims.head_dim)
        return self._linear(mixed, prefix + "o_proj")

    def _mlp(self, prefix: str, x: Node) -> Node:
        gate = ops.swish(self._linear(x, prefix + "gate_proj"))
        return self._linear(ops.multiply(gate, self._linear(x, prefix + "up_proj")), prefix + "down_proj")
