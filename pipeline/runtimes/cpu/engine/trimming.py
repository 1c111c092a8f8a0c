"""Outputs that linear layers were padded with for products in f32 (`ir/joining.py`), removed for those in bf16.

Products in bf16 are packed alike for any number of tokens, and would compute the further outputs for nothing.
"""

from __future__ import annotations

from collections import abc

import numpy as np
import openvino as ov
import openvino.opset15 as ops


def trim_outputs(model: ov.Model, padded: abc.Mapping[str, int]) -> list[ov.Tensor]:
    """Cut the constants of padded layers to the rows that mean something, without a copy.

    Args:
        padded: Name of the constant -> its first rows, which stay; of a shape: the first number, which takes its place.

    Returns:
        What the model points into, to be kept as long as the model is.
    """
    kept: list[ov.Tensor] = []
    for node in model.get_ops():
        rows = padded.get(node.get_friendly_name())
        if rows is None:
            continue
        if node.get_element_type() == ov.Type.i64:
            cut = ops.constant(np.array([rows, *node.data[1:]]))
        else:
            shape, bits = list(node.get_shape()), node.data.reshape(-1).view(np.uint8)
            kept.append(
                ov.Tensor(bits[: bits.size * rows // shape[0]], [rows, *shape[1:]], node.get_element_type())
            )
            cut = ops.constant(kept[-1], shared_memory=True)
        cut.set_friendly_name(node.get_friendly_name())
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(cut.output(0))
    model.validate_nodes_and_infer_types()
    return kept
