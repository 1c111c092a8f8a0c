"""Rounding to the numbers that a quantized kernel computes with, done in float32.

OpenVINO 2026.4 converts float32 to f8e4m3 by way of f16, and so rounds twice: about one value in 300 ends a
whole step off. `to_e4m3` rounds once, as hardware and torch do.
"""

from __future__ import annotations

import math

import openvino.opset15 as ops

from pipeline.runtimes.cpu.ir.nodes import Node, f32

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
    low, high = f32(-128.0 * scale), f32(127.0 * scale)
    return ops.fake_quantize(x, low, high, low, high, 256)
