"""Rotary position embedding: inverse frequencies of each kind, and their application.

Kinds: `default`, `linear` (every frequency divided by a factor) and `llama3` (the low ones divided, after
Meta's reference). Formulas: transformers 5.14.1, modeling_rope_utils.py. Other kinds are refused when the
configuration is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import openvino.opset15 as ops
from openvino import Type

from pipeline.models import Rope
from pipeline.models.tensors import Array
from pipeline.runtimes.cpu.ir.nodes import Node, f32, i64


def inverse_frequencies(rope: Rope, head_dim: int) -> Array:
    """[head_dim / 2] float32: the radians by which one position turns each pair of channels."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / rope.theta**exponents).astype(np.float32)
    scaling = rope.scaling or {}
    if rope.kind == "llama3":
        return _llama3(inverse, scaling)
    if rope.kind == "linear":
        return inverse / np.float32(scaling["factor"])
    assert rope.kind == "default", rope.kind
    return inverse


def _llama3(inverse: Array, scaling: Mapping[str, float]) -> Array:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wavelength = 2 * math.pi / inverse
    kept = (context / wavelength - low) / (high - low)  # share of the unstretched frequency
    between = (1 - kept) * inverse / factor + kept * inverse
    outside = np.where(wavelength > context / low, inverse / factor, inverse)
    is_between = (wavelength >= context / high) & (wavelength <= context / low)
    return np.where(is_between, between, outside).astype(np.float32)


def tables(position_ids: Node, inverse: Array) -> tuple[Node, Node]:
    """position_ids [batch, tokens] -> cosine and sine, each [batch, 1, tokens, head_dim]."""
    positions = ops.unsqueeze(ops.convert(position_ids, Type.f32), i64(2))
    angles = ops.multiply(positions, f32(inverse.reshape(1, 1, -1)))
    both_halves = ops.concat([angles, angles], -1)
    return ops.unsqueeze(ops.cos(both_halves), i64(1)), ops.unsqueeze(ops.sin(both_halves), i64(1))


def rotate(x: Node, cosine: Node, sine: Node, head_dim: int) -> Node:
    """x [batch, heads, tokens, head_dim], turned: x * cos + (-second half, first half) * sin."""
    half, end = head_dim // 2, 2**31 - 1
    first = ops.slice(x, i64([0]), i64([half]), i64([1]), i64([3]))
    second = ops.slice(x, i64([half]), i64([end]), i64([1]), i64([3]))
    turned = ops.concat([ops.multiply(second, f32(-1.0)), first], -1)
    return ops.add(ops.multiply(x, cosine), ops.multiply(turned, sine))
