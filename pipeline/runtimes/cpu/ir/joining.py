"""Linear layers that read one input, as one layer: one product computes their outputs, which are split afterwards.

Fewer and larger products are faster for few tokens, and take less memory where oneDNN packs small matrices twice
(docs/explanation/runtimes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipeline.models import Format, LinearLayer
from pipeline.models.tensors import Array

_PACKED_ONCE = 16 << 20  # bytes of a matrix in f32 from which on it is always packed alike
_MORE = 8  # outputs that are added to a multiple of 32


def join(layers: Sequence[LinearLayer], name: str, *, round_inputs: bool) -> LinearLayer | None:
    """Join layers along their outputs; None where they want inputs of their own, or are of different formats.

    Args:
        layers: They read the same input.
        name: Name of the joined layer.
        round_inputs: Whether inputs will be rounded by the scales of the layers.
    """
    first, *others = layers
    if not all(_is_alike(first, other, round_inputs=round_inputs) for other in others):
        return None
    return replace(
        first,
        name=name,
        weight=np.concatenate([layer.weight for layer in layers]),
        weight_scale=None if first.format is Format.NONE else np.concatenate(list(map(_scales, layers))),
        # That of four-bit floats is in the scales; by that of w4a8_awq, weights are rounded as inputs are.
        weight_scale_2=first.weight_scale_2 if first.format is Format.W4A8_AWQ else None,
        bias=_concatenated(layers, lambda layer: layer.bias),
        zeros=_concatenated(layers, lambda layer: layer.zeros),
    )


def padded(layer: LinearLayer) -> LinearLayer:
    """Add outputs of 0 to a layer that oneDNN would otherwise pack twice where it computes in f32.

    Steps of 7 to 80 tokens have kernels of their own for numbers of outputs that are multiples of 32, unless the
    matrix is large (oneDNN, jit_brgemm_inner_product_utils.cpp: use_small_os_kernels, get_adjusted_oc_block). They
    are not faster.
    """
    rows, columns = layer.shape
    if rows % 32 or rows * columns * 4 >= _PACKED_ONCE:
        return layer

    def zeros(array: Array | None, rows: int = _MORE) -> Array | None:
        return None if array is None else np.zeros((rows, *array.shape[1:]), array.dtype)

    packed = layer.weight.shape[0] * _MORE // rows  # rows of the array
    blank = replace(
        layer,
        weight=np.zeros((packed, *layer.weight.shape[1:]), layer.weight.dtype),
        weight_scale=None
        if layer.weight_scale is None
        else np.ones((_MORE, layer.scales().shape[1]), np.float32),
        bias=zeros(layer.bias),
        zeros=zeros(layer.zeros),
    )
    return join([layer, blank], layer.name, round_inputs=False) or layer


def _is_alike(first: LinearLayer, other: LinearLayer, *, round_inputs: bool) -> bool:
    same = (
        first.format is other.format
        and first.weight.dtype == other.weight.dtype
        and first.weight.shape[1:] == other.weight.shape[1:]
        and _scales(first).shape[1] == _scales(other).shape[1]
        and first.dynamic == other.dynamic
        and all(
            (getattr(first, part) is None) == (getattr(other, part) is None) for part in ("bias", "zeros")
        )
        and all(_equal(getattr(first, part), getattr(other, part)) for part in ("pre_quant_scale", "groups"))
    )
    rounded = ("input_scale", *(("weight_scale_2",) if first.format is Format.W4A8_AWQ else ()))
    return same and not (
        round_inputs and any(not _equal(getattr(first, part), getattr(other, part)) for part in rounded)
    )


def _equal(first: Array | None, second: Array | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def _scales(layer: LinearLayer) -> Array:
    """[out, groups] float32, with one row for each output."""
    scales = layer.scales()
    return np.broadcast_to(scales, (layer.shape[0], scales.shape[1]))


def _concatenated(layers: Sequence[LinearLayer], part: Callable[[LinearLayer], Array | None]) -> Array | None:
    arrays = [array for layer in layers if (array := part(layer)) is not None]
    return np.concatenate(arrays) if arrays else None
