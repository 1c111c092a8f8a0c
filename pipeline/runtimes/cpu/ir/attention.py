"""Attention with a key-value cache held as OpenVINO state, in the form that PagedAttention can replace.

`paged_attention_transformation` matches ReadValue, Gather by beam_idx, Concat with the current tokens, repeat of
the heads, ScaledDotProductAttention; and a sliding window by the exact operations of its mask (OpenVINO 2026.4,
state_management_pattern.cpp, `gpt_oss_sliding_window_pattern`). Keep the operations and their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import openvino as ov
import openvino.opset15 as ops
from openvino import Type
from openvino.op import util

from pipeline.models import Architecture
from pipeline.runtimes.cpu.ir.nodes import Node, f32, i64, parameter, swap_heads

MASKED = -65504.0  # the score of a key that must not be seen


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model is given, and the sizes that follow from it."""

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
