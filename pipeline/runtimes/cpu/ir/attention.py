"""Attention with a key-value cache held as OpenVINO state, in the form that PagedAttention can replace.

`paged_attention_transformation` matches ReadValue -> Gather(beam_idx) -> Concat(current) -> repeat of heads ->
ScaledDotProductAttention, and the mask of a sliding window by its exact operations (state_management_pattern.cpp of
OpenVINO 2026.4, `gpt_oss_sliding_window_pattern`). Keep the operations and their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino import Type
from openvino.op import util

from pipeline.runtimes.cpu.ir.nodes import Node, f32, i64, parameter

MASKED = -65504.0  # added to the score of a key that must not be seen


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model is given, and the sizes that every layer derives from it."""

    input_ids: Node  # [batch, tokens] i64
    attention_mask: Node  # [batch, past + tokens] i64
    position_ids: Node  # [batch, tokens] i64
    beam_idx: Node  # [batch] i32
    batch: Node  # [1] i64
    tokens: Node  # scalar i64
    context: Node  # scalar i64: past + tokens

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
    """[batch, 1, tokens, context] f32: 0 where a query may see a key, else MASKED.

    With a window, key k is seen by query q when q - window < k <= q.
    """
    keys = ops.unsqueeze(ops.range(i64(0), inputs.context, i64(1), Type.i64), i64([0, 1, 2]))
    first = ops.subtract(inputs.context, inputs.tokens)
    queries = ops.unsqueeze(ops.range(first, inputs.context, i64(1), Type.i64), i64([0, 1, 3]))
    causal = ops.less_equal(keys, queries)
    present = ops.greater(ops.unsqueeze(inputs.attention_mask, i64([1, 2])), i64(0))
    if window is None:
        return ops.select(ops.logical_and(causal, present), f32(0.0), f32(MASKED))
    near = ops.greater(keys, ops.add(queries, i64(-window)))
    seen = ops.bitwise_and(causal, ops.bitwise_and(ops.bitwise_and(causal, near), present))
    seen = ops.bitwise_and(seen, present)
    shape = ops.concat([inputs.batch, i64([1]), ops.unsqueeze(inputs.tokens, i64(0)),
                        ops.unsqueeze(inputs.context, i64(0))], 0)  # fmt: skip
    scores = ops.select(ops.broadcast(seen, shape), f32(0.0), f32(MASKED))
    return ops.slice(scores, i64([0]), ops.unsqueeze(inputs.context, i64(0)), i64([1]), i64([3]))


class KeyValueCache:
    """The state of one model: two variables a layer, and the assignments that write them back."""

    def __init__(self, inputs: Inputs, *, heads: int, kv_heads: int, head_dim: int) -> None:
        self._inputs = inputs
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, head_dim
        self.assignments: list[Node] = []

    def append(self, layer: int, kind: str, current: Node) -> Node:
        """current [batch, kv_heads, tokens, head_dim] -> all so far, repeated to [batch, heads, context, head_dim]."""
        info = util.VariableInfo()
        info.data_shape = ov.PartialShape([-1, self._kv_heads, -1, self._head_dim])
        info.data_type = Type.f32
        info.variable_id = f"past_key_values.{layer}.{kind}present.{layer}.{kind}"
        variable = util.Variable(info)
        empty = ops.concat([self._inputs.batch, i64([self._kv_heads, 0, self._head_dim])], 0)
        past = ops.read_value(ops.broadcast(f32(0.0), empty), variable)
        everything = ops.concat([ops.gather(past, self._inputs.beam_idx, i64(0)), current], 2)
        self.assignments.append(ops.assign(everything, variable))
        repeats = np.array([1, 1, self._heads // self._kv_heads, 1, 1], dtype=np.int64)
        grouped = ops.broadcast(
            ops.unsqueeze(everything, i64(2)), ops.constant(repeats), broadcast_spec="BIDIRECTIONAL"
        )
        return ops.reshape(grouped, i64([0, self._heads, -1, self._head_dim]), special_zero=True)


def attend(query: Node, key: Node, value: Node, mask: Node, *, heads: int, head_dim: int) -> Node:
    """[batch, heads, tokens, head_dim] each -> [batch, tokens, heads * head_dim]."""
    scale = f32(head_dim**-0.5)
    mixed = ops.scaled_dot_product_attention(query, key, value, mask, scale, causal=False)
    joined = ops.transpose(mixed, i64([0, 2, 1, 3]))
    return ops.reshape(joined, i64([0, 0, heads * head_dim]), special_zero=True)
