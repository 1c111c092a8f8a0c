"""Constants for weights in the precision of the file, and the multiplication by them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino import Type

from pipeline.runtimes.cpu.ir.nodes import Node

_PLAIN = {
    np.dtype(np.float32): Type.f32,
    np.dtype(np.float16): Type.f16,
    np.dtype(ml_dtypes.bfloat16): Type.bf16,
}


def constant(array: np.ndarray, name: str) -> Node:
    """The array as it lies in the file: f32, f16 or bf16."""
    tensor = ov.Tensor(
        np.ascontiguousarray(array).view(_storage(array.dtype)), list(array.shape), _PLAIN[array.dtype]
    )
    node = ops.constant(tensor, shared_memory=False)
    node.set_friendly_name(name)
    return node


def plain(array: np.ndarray, name: str) -> Node:
    """The array as f32 values; 16-bit floats are widened when the model is compiled, which is exact."""
    node = constant(array, name)
    return node if array.dtype == np.float32 else ops.convert(node, Type.f32)


def _storage(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.uint16) if dtype.itemsize == 2 else dtype
