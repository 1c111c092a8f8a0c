"""One linear layer as it is stored, and the weight that it stands for.

    y = round_input(x * pre_quant_scale) @ dequantize().T + bias

Layouts of ModelOpt 0.47's unified Hugging Face export (tests/stages/test_calibrate_layouts.py compares them
with ModelOpt's own fake-quantized model):

    fp8       weight e4m3 [out, in];  weight_scale f32 scalar; input_scale f32 scalar
    int4_awq  weight u8 [out/2, in], rows 2i in the low and 2i+1 in the high nibble, two's complement;
              weight_scale f32 [out, in/group]; pre_quant_scale [in] on o_proj and down_proj; the others' is
              folded into the norm before them
    w4a8_awq  as int4_awq, and weight_scale_2 f32 scalar: the dequantized weight is rounded to e4m3 multiples
              of it; input_scale f32 scalar
    int8_sq   weight i8 [out, in]; weight_scale f32 [out]; input_scale f32 scalar; pre_quant_scale [in]
    mxfp4     all experts of a layer (gpt-oss as published): blocks u8 [experts, out, in/32, 16], columns 2j low
              and 2j+1 high, e2m1; scales u8 [experts, out, in/32], powers of two with a bias of 127
    nvfp4     weight u8 [out, in/2], columns 2j low and 2j+1 high, e2m1; weight_scale e4m3 [out, in/16];
              weight_scale_2 f32 scalar; input_scale f32 scalar; w4a16_nvfp4 has no input_scale. All experts of a
              layer (gpt-oss): the same turned round, [experts, in/2, out] and [experts, in/16, out]

Those of compressed-tensors are in `pipeline.models.compressed`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from pipeline.models.quantization import AWQ, FP4, Format
from pipeline.models.tensors import Array

E4M3_MAX = 448.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
MX_GROUP, NV_GROUP = 32, 16  # columns that share a scale
INPUT_GROUP = 32  # the same of inputs that the `cpu` runtime rounds to 8 bits in short steps
HEAD_GROUP = 128  # the same of an output projection that is rounded to 8 bits


@dataclass(frozen=True, slots=True, eq=False)
class LinearLayer:
    """The tensors of one linear layer, as stored."""

    name: str
    format: Format
    weight: Array  # shape and type by format, see above; [out, in] in the model's type if not quantized
    bias: Array | None = None
    weight_scale: Array | None = None
    weight_scale_2: Array | None = None
    input_scale: Array | None = None
    pre_quant_scale: Array | None = None
    group_size: int | None = None
    zeros: Array | None = None  # i8 [out, groups]: what codes are counted from; None: from 0
    groups: Array | None = None  # [in]: group of each column; None: neighbours share one
    dynamic: str = ""  # inputs are rounded by a scale for each token, found as it comes: to "int8" or "fp8"

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs), whatever the packing."""
        rows, columns = self.weight.shape
        if self.format in AWQ:
            rows *= 2
        if self.format in FP4:
            columns *= 2
        return rows, columns

    def codes(self) -> Array:
        """Unpack the stored numbers, [out, in]: int8 (4 and 8 bits), e4m3 (fp8), float32 (four-bit floats, none)."""
        if self.format in AWQ:
            return unpack_rows(self.weight)
        if self.format in FP4:
            return unpack_e2m1(self.weight)
        if self.format is Format.NONE:
            return self.weight.astype(np.float32)
        return self.weight

    def scales(self) -> Array:
        """Return the scales, float32 [out, groups]: [out, 1] where a row shares one, [1, 1] where the tensor does.

        The second step of w4a8_awq is not in it.
        """
        if self.format is Format.NONE:
            return np.ones((1, 1), np.float32)
        assert self.weight_scale is not None
        scale = self.weight_scale.astype(np.float32)
        if self.format in FP4 and self.weight_scale_2 is not None:
            return scale * self.weight_scale_2.astype(np.float32)
        return scale.reshape(-1, 1) if scale.ndim < 2 else scale

    def dequantize(self) -> Array:
        """Return the weight that the layer multiplies with, float32 [out, in]; infinite where it is beyond float32."""
        codes, scales = self.codes().astype(np.float32), self.scales()
        columns, groups = codes.shape[1], scales.shape[1]
        place = np.arange(columns) // (columns // groups) if self.groups is None else self.groups
        weight: Array = codes if self.zeros is None else codes - self.zeros[:, place]
        with np.errstate(over="ignore"):
            weight *= scales[:, place]
        if self.format is Format.W4A8_AWQ:
            assert self.weight_scale_2 is not None
            weight = round_e4m3(weight, self.weight_scale_2.reshape(()).item())
        return weight

    def in_int8(self) -> LinearLayer:
        """Round a layer that is not quantized to 8 bits: a scale for each `HEAD_GROUP` inputs, or for a row."""
        rows, columns = self.weight.shape
        size = HEAD_GROUP if columns % HEAD_GROUP == 0 else columns
        groups = self.weight.astype(np.float32).reshape(rows, -1, size)
        scales = np.maximum(np.abs(groups).max(axis=2), np.float32(1e-30)) / np.float32(127)
        codes = np.rint(groups / scales[:, :, None]).astype(np.int8).reshape(rows, columns)
        return replace(self, format=Format.INT8_GROUP, weight=codes, weight_scale=scales)


def unpack_rows(packed: Array) -> Array:
    """uint8 [out/2, in] -> int8 [out, in]: the low nibble is the even row, the high nibble the odd one.

    >>> unpack_rows(np.array([[0xF1]], np.uint8)).tolist()
    [[1], [-1]]
    """
    signed = packed.view(np.int8)
    low, high = (signed << 4) >> 4, signed >> 4
    rows: Array = np.stack([low, high], axis=1).reshape(-1, packed.shape[1])
    return rows


def unpack_e2m1(packed: Array) -> Array:
    """uint8 [out, in/2] -> float32 [out, in]: low nibble the even column, high nibble the odd one."""
    pairs = np.stack([packed & 0x0F, packed >> 4], axis=2).reshape(packed.shape[0], -1)
    values: Array = E2M1[pairs]
    return values


def round_e4m3(values: Array, scale: float) -> Array:
    """`values` as e4m3 multiples of `scale`, saturating at ±448; float32."""
    ratio = np.clip(values / np.float32(scale), -E4M3_MAX, E4M3_MAX)
    return ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(scale)
