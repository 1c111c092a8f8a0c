"""Linear layers as graph operations, their weights packed as they were calibrated.

    none      bf16, f16 or f32 as in the file, widened when the model is compiled, which is exact
    fp8       f8e4m3. The scales multiply the product: so OpenVINO folds the weight when it compiles, and runs
              as fast as f32; were the weight multiplied instead, it would keep the folded weight twice
    int4_awq  i4 in groups, multiplied in packed form
    w4a8_awq  as int4_awq; with rounded inputs, f8e4m3, since the calibrated model rounds int4 * scale to that
    int8_sq   i8 with a scale a row, multiplied in packed form; with rounded inputs, integer products

A `pre_quant_scale` multiplies the input. `input_scale` rounds it where `round_inputs` is set.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import openvino.opset15 as ops

from pipeline.models import Format, LinearLayer
from pipeline.runtimes.cpu.ir.constants import Constants, widen
from pipeline.runtimes.cpu.ir.nodes import Node, f32, i64
from pipeline.runtimes.cpu.ir.numerics import quantize_int8, to_e4m3


class Linears:
    """Builds the products of one model; inputs that several layers share are scaled and rounded once."""

    def __init__(self, constants: Constants, *, round_inputs: bool) -> None:
        self._constants, self._round = constants, round_inputs
        self._inputs: dict[tuple[str, bytes, float | None], Node] = {}

    def product(self, x: Node, layer: LinearLayer, name: str) -> Node:
        """[..., in] f32 -> [..., out] f32, without the bias; `name` is that of the weight's tensor."""
        match layer.format:
            case Format.NONE:
                return _matmul(x, widen(self._constants.add(layer.weight, name)))
            case Format.FP8:
                return self._fp8(x, layer, name)
            case Format.INT8_SQ:
                weight = widen(self._constants.add(layer.weight, name))
                return _matmul(self._input(x, layer), ops.multiply(weight, f32(layer.scales())))
            case Format.W4A8_AWQ if self._round:
                return self._fp8(x, _as_fp8(layer), name)
            case _:
                return _matmul(self._input(x, layer), self._grouped(layer, name))

    def _fp8(self, x: Node, layer: LinearLayer, name: str) -> Node:
        scale = float(layer.scales().item())
        if self._round:
            scale *= _input_scale(layer)
        product = _matmul(self._input(x, layer), widen(self._constants.add(layer.weight, name)))
        return ops.multiply(product, f32(scale))

    def _grouped(self, layer: LinearLayer, name: str) -> Node:
        assert layer.group_size is not None
        codes = widen(self._constants.add_int4(layer.codes(), layer.group_size, name))
        weight = ops.multiply(codes, f32(layer.scales()[:, :, None]))
        return ops.reshape(weight, i64(layer.shape), special_zero=False)

    def _input(self, x: Node, layer: LinearLayer) -> Node:
        """x, scaled and rounded as the layer wants it: for e4m3 the codes, without `input_scale`."""
        before = b"" if layer.pre_quant_scale is None else layer.pre_quant_scale.tobytes()
        scale = _input_scale(layer) if self._round and layer.input_scale is not None else None
        key = (x.get_name(), before, scale)
        if key not in self._inputs:
            if layer.pre_quant_scale is not None:
                x = ops.multiply(x, f32(layer.pre_quant_scale.astype(np.float32)))
            if scale is not None:
                x = quantize_int8(x, scale) if layer.format is Format.INT8_SQ else to_e4m3(x, scale)
            self._inputs[key] = x
        return self._inputs[key]


def _as_fp8(layer: LinearLayer) -> LinearLayer:
    """The second step of w4a8_awq taken: e4m3 numbers that `weight_scale_2` multiplies."""
    assert layer.weight_scale_2 is not None
    codes = layer.dequantize() / layer.weight_scale_2.astype(np.float32)
    return LinearLayer(
        name=layer.name,
        format=Format.FP8,
        weight=codes.astype(ml_dtypes.float8_e4m3fn),
        weight_scale=layer.weight_scale_2,
        input_scale=layer.input_scale,
        pre_quant_scale=layer.pre_quant_scale,
    )


def _input_scale(layer: LinearLayer) -> float:
    assert layer.input_scale is not None
    return float(layer.input_scale.item())


def _matmul(x: Node, weight: Node) -> Node:
    """weight is [out, in]."""
    return ops.matmul(x, weight, False, True)
