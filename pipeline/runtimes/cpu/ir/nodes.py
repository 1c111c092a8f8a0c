"""Short spellings of the OpenVINO operations that a decoder is made of, and names that do not vary.

OpenVINO names a node by a counter of the process ("Multiply_1234"), so two builds of one model would differ
in every line of the .xml. `name_nodes` gives each node the name of its place in the graph instead.
"""

from __future__ import annotations

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


def swap_heads(x: Node) -> Node:
    """[batch, tokens, heads, head_dim] <-> [batch, heads, tokens, head_dim]."""
    return ops.transpose(x, i64([0, 2, 1, 3]))


def name_nodes(model: ov.Model) -> None:
    """Give every node that OpenVINO named by its counter a name that follows from the graph alone."""
    for index, node in enumerate(model.get_ordered_ops()):
        kind = node.get_type_name()
        if re.fullmatch(rf"{kind}_\d+", node.get_friendly_name()):
            node.set_friendly_name(f"{kind}.{index}")
