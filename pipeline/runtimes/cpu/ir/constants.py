"""Tensors of a checkpoint as OpenVINO constants, in the type of the file and without a copy.

A constant points into the mapped file (or into an array made here), so the `Constants` must outlive the
model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino import Type

from pipeline.models.tensors import Array
from pipeline.runtimes.cpu.ir.nodes import Node

_TYPES = {
    np.dtype(np.float32): Type.f32,
    np.dtype(np.float16): Type.f16,
    np.dtype(ml_dtypes.bfloat16): Type.bf16,
    np.dtype(ml_dtypes.float8_e4m3fn): Type.f8e4m3,
    np.dtype(np.int8): Type.i8,
}
# By size in bytes: what ov.Tensor takes, whatever the bits mean.
_BITS: Mapping[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.float32),
}


class Constants:
    """Makes constants, one a name, keeps their memory, and counts what each class of layer holds."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._nodes: dict[str, Node] = {}
        self._types: defaultdict[str, set[str]] = defaultdict(set)
        self._bytes: defaultdict[str, int] = defaultdict(int)

    def add(self, array: Array, name: str) -> Node:
        """`array` as it is: f32, f16, bf16, f8e4m3 or i8."""
        bits = np.ascontiguousarray(array).view(_BITS[array.dtype.itemsize])
        return self._nodes.get(name) or self._make(bits, list(array.shape), _TYPES[array.dtype], name)

    def add_int4(self, codes: Array, group_size: int, name: str) -> Node:
        """codes int8 [out, in], -8 to 7 -> i4 [out, in / group_size, group_size].

        OpenVINO packs along the row: the even column in the low nibble, the odd one in the high nibble.
        """
        rows, columns = codes.shape
        nibbles = codes.view(np.uint8) & 0x0F
        packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
        return self._make(packed, [rows, columns // group_size, group_size], Type.i4, name)

    def census(self) -> dict[str, dict[str, object]]:
        """Class of layer ("q_proj", "embed_tokens", "norm") -> the types of its weights, and their bytes."""
        return {
            kind: {"precision": "+".join(sorted(self._types[kind])), "bytes": self._bytes[kind]}
            for kind in sorted(self._types)
        }

    def _make(self, bits: Array, shape: list[int], dtype: Type, name: str) -> Node:
        node = ops.constant(ov.Tensor(bits, shape, dtype), shared_memory=True)
        node.set_friendly_name(name)
        self._arrays.append(bits)
        self._nodes[name] = node
        layer, part = name.split(".")[-2:]
        if part == "weight":
            kind = "norm" if layer.endswith("norm") else layer
            self._types[kind].add(dtype.get_type_name())
            self._bytes[kind] += bits.nbytes
        return node


def widen(node: Node) -> Node:
    """Any narrower number as f32, in which it is exact."""
    return node if node.get_element_type() == Type.f32 else ops.convert(node, Type.f32)
