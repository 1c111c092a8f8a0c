"""Rotary position embedding: the inverse frequencies of each kind that can be built, and its application.

Kinds: `default`, `linear` (positions divided by a factor) and `llama3` (low frequencies stretched, after Meta's
reference). `dynamic` depends on the length of the sequence and the others scale attention too: they are refused by name.
Formulas: transformers 5.14.1, modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import openvino.opset15 as ops
from openvino import Type

from pipeline.errors import UserError
from pipeline.runtimes.cpu.ir.nodes import Node, f32, i64

SUPPORTED = ("default", "linear", "llama3")


def inverse_frequencies(head_dim: int, theta: float, kind: str, scaling: Mapping[str, float]) -> np.ndarray:
    """[head_dim / 2] float32: radians that one position turns each pair of channels."""
    inverse = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    inverse = inverse.astype(np.float32)
    if kind == "default":
        return inverse
    if kind == "linear":
        return (inverse / np.float32(scaling["factor"])).astype(np.float32)
    if kind == "llama3":
        return _llama3(inverse, scaling)
    raise UserError(
        f"rope type {kind!r} cannot be built for the cpu runtime (it can do {', '.join(SUPPORTED)})"
    )


def _llama3(inverse: np.ndarray, scaling: Mapping[str, float]) -> np.ndarray:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context, factor = scaling["original_max_position_embeddings"], np.float32(scaling["factor"])
    wavelength = np.float32(2 * math.pi) / inverse
    share = (context / wavelength - low) / (high - low)
    between = (1 - share) * inverse / factor + share * inverse
    kept = np.where(wavelength > context / low, inverse / factor, inverse)
    is_between = (wavelength >= context / high) & (wavelength <= context / low)
    return np.where(is_between, between, kept).astype(np.float32)


def tables(position_ids: Node, inverse: np.ndarray) -> tuple[Node, Node]:
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
