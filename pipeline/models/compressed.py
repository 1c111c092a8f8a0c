"""Linear layers as compressed-tensors stores them: the tensors of each format, and how they are unpacked.

    fp8, fp8_row          weight e4m3 [out, in]; weight_scale [1] or [out, 1]; input_scale [1] where it is static
    int8_row, int8_group  weight i8 [out, in] (int-quantized, naive-quantized), or weight_packed as for int4
    int4, int4_zeros      weight_packed i32 [out, in/8], the first column in the lowest bits, 8 more than the number;
                          weight_shape; weight_scale [out, groups]; weight_zero_point i32 [out/8, groups], packed along
                          the rows; weight_g_idx i32 [in], the group of each column where neighbours share none
    nvfp4, w4a16_nvfp4    weight_packed u8 [out, in/2], columns 2j low and 2j+1 high; weight_scale e4m3 [out, in/16];
                          weight_global_scale f32 [1], which divides; input_global_scale f32 [1], too
    mxfp4                 weight_packed as for nvfp4; weight_scale u8 [out, in/32], exponents of two plus 127

Scales are of the model's type where nothing is said. Source: compressed-tensors 0.20.1, compressors/{pack_quantized,
naive_quantized,nvfp4,mxfp4}. Sparse checkpoints and packings of other widths are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pipeline.models.architecture import LinearShape
from pipeline.models.layers import LinearLayer
from pipeline.models.published import StoredFormat
from pipeline.models.quantization import FP4, Format
from pipeline.models.tensors import Array

FLOATS = ("BF16", "F16", "F32")
PARTS = (
    "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale", "input_global_scale",
)  # fmt: skip
_INTEGERS = (Format.INT4, Format.INT4_ZEROS, Format.INT8_ROW, Format.INT8_GROUP)

Layout = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], bool]  # types, shapes, needed


def layout(layer: LinearShape, how: StoredFormat, parts: frozenset[str]) -> Iterator[tuple[str, Layout]]:
    """List the tensors of a quantized layer besides its bias.

    Args:
        parts: Parts that the files hold: 8-bit integers are packed, or not.
    """
    form, rows, columns = Format(how.name), layer.rows, layer.columns
    groups = columns // how.group if 0 < how.group < columns else 1
    scalar, a_row = ((), (1,)), ((rows, groups), (rows,)) if groups == 1 else ((rows, groups),)
    if form in FP4:
        yield "weight_packed", (("U8",), ((rows, columns // 2),), True)
        scales = ("U8", "F8_E8M0") if form is Format.MXFP4 else ("F8_E4M3",)
        yield "weight_scale", (scales, ((rows, groups),), True)
        if form is not Format.MXFP4:
            yield "weight_global_scale", (("F32",), scalar, True)
        yield "input_global_scale", (("F32",), scalar, form is Format.NVFP4 and not how.dynamic)
    elif form in (Format.FP8, Format.FP8_ROW):
        yield "weight", (("F8_E4M3",), ((rows, columns),), True)
        yield "weight_scale", (FLOATS, scalar if form is Format.FP8 else a_row, True)
        yield "input_scale", (FLOATS, scalar, False)
    else:
        bits = 4 if form in (Format.INT4, Format.INT4_ZEROS) else 8
        if bits == 4 or "weight_packed" in parts:
            yield "weight_packed", (("I32",), ((rows, -(-columns * bits // 32)),), True)
            yield "weight_shape", (("I32", "I64"), ((2,),), True)
            yield "weight_g_idx", (("I32", "I64"), ((columns,),), False)
        else:
            yield "weight", (("I8",), ((rows, columns),), True)
        yield "weight_scale", (FLOATS, a_row, True)
        if form is Format.INT4_ZEROS:
            yield "weight_zero_point", (("I32",), ((-(-rows // 8), groups),), True)


def unpack(name: str, shape: LinearShape, how: StoredFormat, parts: Mapping[str, Array]) -> LinearLayer:
    """Make a layer of its tensors, whose headers `layout` describes."""
    form, scale = Format(how.name), parts["weight_scale"]
    rows, columns = shape.rows, shape.columns
    input_scale = parts.get("input_scale")
    zeros = None
    if form in FP4:
        weight = parts["weight_packed"]
        if form is Format.MXFP4:
            scale = np.ldexp(np.float32(1), scale.view(np.uint8).astype(np.int32) - 127)
        else:
            scale = scale.astype(np.float32) / parts["weight_global_scale"].reshape(())
            stored_scale = parts.get("input_global_scale")
            input_scale = None if stored_scale is None else (1 / stored_scale).astype(np.float32)
    elif "weight_packed" in parts:
        bits = 4 if form in (Format.INT4, Format.INT4_ZEROS) else 8
        weight = unpack_words(parts["weight_packed"], bits, columns)
        if form is Format.INT4_ZEROS:
            zeros = unpack_words(parts["weight_zero_point"].T, bits, rows).T
    else:
        weight = parts["weight"]
    if form in _INTEGERS or form is Format.FP8_ROW:
        scale = scale.reshape(rows, -1)
    return LinearLayer(
        name=name,
        format=form,
        weight=weight,
        bias=parts.get("bias"),
        weight_scale=scale,
        input_scale=input_scale,
        group_size=how.group if 0 < how.group < columns else None,
        zeros=zeros,
        groups=parts.get("weight_g_idx"),
        dynamic=how.dynamic,
    )


def unpack_words(packed: Array, bits: int, columns: int) -> Array:
    """int32 [rows, ceil(columns * bits / 32)] -> int8 [rows, columns], for 4 and 8 bits.

    >>> unpack_words(np.array([[0x0F9]], np.int32), 4, 3).tolist()
    [[1, 7, -8]]
    """
    codes = np.ascontiguousarray(packed).astype("<i4").view(np.uint8)
    if bits == 4:
        codes = np.stack([codes & 0x0F, codes >> 4], axis=2).reshape(len(codes), -1)
    return (codes[:, :columns].astype(np.int16) - (1 << (bits - 1))).astype(np.int8)
