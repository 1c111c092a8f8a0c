"""Operations that graphs of decoders are made of, and the rounding of their numbers.

OpenVINO names a node by a counter of the process ("Multiply_1234"), so two builds of one model would differ
in every line of the .xml. `name_nodes` gives each node the name of its place in the graph instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino import Type

from pipeline.models.tensors import Array

Node: TypeAlias = ov.Node


def f32(value: float | Array) -> Node:
    """A float32 constant: a scalar or an array."""
    return ops.constant(np.asarray(value, dtype=np.float32))


def i64(value: int | Sequence[int]) -> Node:
    """An int64 constant: a scalar or a list."""
    return ops.constant(np.asarray(value, dtype=np.int64))


def named(node: Node, name: str) -> Node:
    """Name a node, and return it."""
    node.set_friendly_name(name)
    return node


def parameter(name: str, shape: Sequence[int], dtype: Type) -> Node:
    """An input of the model; -1 marks a dimension that varies."""
    node = ops.parameter(ov.PartialShape(list(shape)), dtype)
    node.set_friendly_name(name)
    node.output(0).get_tensor().set_names({name})
    return node


def rms_norm(x: Node, weight: Node, epsilon: float) -> Node:
    """x / sqrt(mean(x²) + epsilon) * weight over the last axis, in the form that OpenVINO fuses."""
    mean = ops.reduce_mean(ops.multiply(x, x), i64([-1]), keep_dims=True)
    root = ops.sqrt(ops.add(mean, f32(epsilon)))
    return ops.multiply(ops.multiply(x, ops.divide(f32(1.0), root)), weight)


def split_heads(x: Node, heads: int, head_dim: int) -> Node:
    """[batch, tokens, heads * head_dim] -> [batch, tokens, heads, head_dim]."""
    return ops.reshape(x, i64([0, 0, heads, head_dim]), special_zero=True)


def parts(x: Node, sizes: Sequence[int]) -> list[Node]:
    """Split x [..., sum of sizes] along its last axis."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        ops.slice(x, i64([start]), i64([start + size]), i64([1]), i64([-1]))
        for start, size in zip(starts, sizes, strict=True)
    ]


def swap_heads(x: Node) -> Node:
    """[batch, tokens, heads, head_dim] <-> [batch, heads, tokens, head_dim]."""
    return ops.transpose(x, i64([0, 2, 1, 3]))


def name_nodes(model: ov.Model) -> None:
    """Give every node that OpenVINO named by its counter a name that follows from the graph alone."""
    for index, node in enumerate(model.get_ordered_ops()):
        kind = node.get_type_name()
        if re.fullmatch(rf"{kind}_\d+", node.get_friendly_name()):
            node.set_friendly_name(f"{kind}.{index}")


def widen(node: Node) -> Node:
    """Any narrower number as f32, in which it is exact."""
    return node if node.get_element_type() == Type.f32 else ops.convert(node, Type.f32)


E4M3_MAX = 448.0
_SMALLEST_NORMAL = 2.0**-6  # below it, steps are 2^-9


def to_e4m3(x: Node, scale: float) -> Node:
    """The e4m3 number nearest to x / scale, ties to even, saturating.

    With scale 1: [0.3, 17.0, 1000.0] -> [0.3125, 16.0, 448.0].
    """
    ratio = ops.clamp(ops.multiply(x, f32(1.0 / scale)), -E4M3_MAX, E4M3_MAX)
    # In [2^e, 2^(e+1)) steps are 2^(e-3). The margin keeps the logarithm of 2^-6 from falling below -6; at the
    # other powers of two an error in its last bit does no harm, because they are multiples of both steps.
    magnitude = ops.maximum(ops.abs(ratio), f32(_SMALLEST_NORMAL * 1.0001))
    exponent = ops.floor(ops.multiply(ops.log(magnitude), f32(1 / math.log(2))))
    step = ops.exp(ops.multiply(ops.subtract(exponent, f32(3.0)), f32(math.log(2))))
    return ops.multiply(ops.round(ops.divide(ratio, step), "half_to_even"), step)


def round_e4m3(x: Node, scale: float) -> Node:
    """x as the nearest multiple of `scale` that e4m3 can hold."""
    return ops.multiply(to_e4m3(x, scale), f32(scale))


def round_int8(x: Node, scale: float) -> Node:
    """x as the nearest multiple of `scale` from -128 to 127 times it."""
    steps = ops.round(ops.multiply(x, f32(1.0 / scale)), "half_to_even")
    return ops.multiply(ops.clamp(steps, -128.0, 127.0), f32(scale))


def quantize_int8(x: Node, scale: float) -> Node:
    """As `round_int8`, in the form by which OpenVINO multiplies 8-bit inputs and weights as integers."""
    ends = f32(-128.0 * scale), f32(127.0 * scale)
    return ops.fake_quantize(x, *ends, *ends, 256)


def round_by_token(x: Node, *, whole: bool) -> Node:
    """x [..., in] as multiples of a scale for each token, by which the largest is 448 (e4m3), or 127 (`whole`).

    As vLLM's kernels find it for dynamic W8A8 (csrc/quantization/compressed_tensors/int8_quant_kernels.cu).
    """
    largest = ops.reduce_max(ops.abs(x), i64([-1]), keep_dims=True)
    scale = ops.divide(ops.maximum(largest, f32(1e-30)), f32(127.0 if whole else E4M3_MAX))
    ratio = ops.divide(x, scale)
    steps = ops.clamp(ops.round(ratio, "half_to_even"), -128.0, 127.0) if whole else to_e4m3(ratio, 1.0)
    return ops.multiply(steps, scale)
