"""Weights of a decoder as graph operations: embedding, norms, linear layers, the rounding of its cache.

Whatever is asked for is remembered, so that no tensor of a file can be left out silently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino import Type

from pipeline.errors import UserError
from pipeline.models import CheckpointReader, Format, LinearLayer
from pipeline.models.quantization import AWQ, FP4
from pipeline.models.reader import PARTS
from pipeline.models.tensors import Array
from pipeline.runtimes.cpu.ir.joining import join, padded
from pipeline.runtimes.cpu.ir.nodes import (
    Node,
    f32,
    i64,
    named,
    parts,
    quantize_int8,
    round_by_token,
    round_e4m3,
    round_int8,
    to_e4m3,
    widen,
)

_FOLLOWS_FROM_CONFIG = "rotary_emb.inv_freq"  # old checkpoints carry it


class Weights:
    """The tensors of one checkpoint as graph operations.

    With `simulate`, the inputs of quantized layers, keys and values are rounded as the calibrated model does.
    """

    def __init__(self, checkpoint: CheckpointReader, *, simulate: bool) -> None:
        quantization, cache = checkpoint.quantization, checkpoint.quantization.kv_cache
        layers = (*checkpoint.architecture.linears(), *checkpoint.architecture.stacked_experts())
        kinds = {quantization.stored(shape.name) for shape in layers}
        unsimulated = sorted(
            kind.name for kind in kinds if kind.name == Format.NVFP4 or kind.dynamic == "other"
        )
        if simulate and unsimulated:
            raise UserError(
                f"inputs of {', '.join(unsimulated)} layers are not simulated on the cpu runtime "
                "(set runtime.simulate_activations to false: weights are what they are)"
            )
        if cache is not None and cache not in CACHES:
            raise UserError(f"a {cache} cache cannot be built for the cpu runtime; {', '.join(CACHES)} can")
        self.constants = Constants()
        self._checkpoint, self._simulate = checkpoint, simulate
        self._read: set[str] = set()
        # Whether the engine may round inputs to 8 bits by scales that it finds itself.
        self.rounds = checkpoint.has_integers and not simulate
        self._linears = Linears(self.constants, round_inputs=simulate)
        self.padded: dict[str, int] = {}  # constant of a padded layer -> its rows that mean something
        self.linears: dict[str, tuple[Node, Node]] = {}  # layer -> its input, and its output with the bias

    def embed(self, token_ids: Node) -> Node:
        """[batch, tokens] i64 -> [batch, tokens, hidden] f32."""
        # Widened first, for OpenVINO then reads rows of 16 bits; otherwise it keeps a copy in f32 where it lacks bf16.
        table = widen(self._plain(self._checkpoint.architecture.embedding))
        return ops.gather(table, ops.convert(token_ids, Type.i32), i64(0))

    def vector(self, name: str) -> Node:
        """[size] f32: the tensor `name`."""
        return widen(self._plain(name))

    def values(self, name: str) -> Array:
        """The tensor `name` as float32 numbers, for what has to be a constant of the graph."""
        self._read.add(name)
        return self._checkpoint.array(name)

    def experts(self, names: Sequence[str]) -> Node:
        """[experts, out, in] f32: weights of one linear layer of each expert, as they are or dequantized."""
        layers = [self._checkpoint.linear(name) for name in names]
        for name, layer in zip(names, layers, strict=True):
            self._read |= self._parts(layer, name)
            if layer.format is not Format.NONE and self._simulate:
                raise UserError(
                    f"{name}: inputs of experts cannot be rounded; simulate_activations: false builds it"
                )
        return self._experts(layers, f"{names[0].replace('.experts.0.', '.experts.')}.weight")

    def stacked(self, name: str) -> tuple[Node, Node]:
        """Weights [experts, out, in] and biases [experts, 1, out] of a tensor that holds all experts of a layer."""
        self._read |= {tensor for tensor in self._checkpoint.tensors if tensor.startswith(name)}
        layers = [self._checkpoint.expert(name, at) for at in range(self._checkpoint.architecture.experts)]
        return self._experts(layers, f"{name}.weight"), f32(self.values(f"{name}_bias")[:, None, :])

    def _experts(self, layers: Sequence[LinearLayer], name: str) -> Node:
        """Four-bit floats as whole numbers of 8 bits with scales; other formats as they are, or by their scales."""
        if any(layer.format not in FP4 for layer in layers):
            return widen(self.constants.add(np.stack([_expert(layer) for layer in layers]), name))
        # Twice the e2m1 numbers are whole, and their products with half the scales are exact.
        codes = np.stack([(2 * layer.codes()).astype(np.int8) for layer in layers])
        scales = np.stack([layer.scales() / 2 for layer in layers])[..., None]
        constant = self.constants.add(codes.reshape(*scales.shape[:-1], -1), name)
        grouped = ops.multiply(widen(constant), f32(scales))
        return ops.reshape(grouped, i64(list(codes.shape)), special_zero=False)

    def linear(self, x: Node, name: str) -> Node:
        """[..., in] -> [..., out]: the linear layer `name`, its bias included."""
        layer = self._checkpoint.linear(name)
        self._read |= self._parts(layer, name)
        (output,) = self._split(x, layer, [layer.shape[0]])
        self.linears[name] = (x, output)
        return output

    def router(self, x: Node, name: str) -> Node:
        """As `linear`, in the form from which OpenVINO recognizes experts."""
        product = self._apply(x, name, name)
        self.linears[name] = (x, product)
        return product

    def joined(self, x: Node, block: str, names: Sequence[str], joined: str) -> list[Node]:
        """[..., in] -> [..., out] of each linear layer of `names`, by one product `joined` if they can be joined."""
        layers = {block + name: self._checkpoint.linear(block + name) for name in names}
        whole = join([*layers.values()], block + joined, round_inputs=self._simulate)
        if whole is None:
            return [self.linear(x, name) for name in layers]
        outputs = self._split(x, whole, [layer.shape[0] for layer in layers.values()])
        for (name, layer), output in zip(layers.items(), outputs, strict=True):
            self._read |= self._parts(layer, name)
            self.linears[name] = (x, output)
        return outputs

    def heads(self, x: Node) -> list[Node]:
        """[..., hidden] -> [..., vocab]: the output projection, or the embedding where they are tied.

        A second one, in 8 bits, follows if inputs of the layers may be rounded to 8 bits (`rounds`).
        """
        shape = self._checkpoint.architecture.output_projection()
        exact = self._apply(x, shape.name, self._checkpoint.stored_name(shape))
        layer = self._checkpoint.linear(shape.name)
        if not self.rounds or layer.format is not Format.NONE:
            return [exact]
        product = self._linears.product(x, layer.in_int8(), f"{shape.name}_int8.weight")
        return [
            exact,
            product if layer.bias is None else ops.add(product, widen(self._plain(f"{shape.name}.bias"))),
        ]

    def cached(self, layer: int, key: Node, value: Node) -> tuple[Node, Node]:
        """Keys and values as the cache of the calibrated model holds them, if it is quantized."""
        quantization = self._checkpoint.quantization
        scales, kind = self._checkpoint.kv_scales(layer), quantization.kv_cache
        if scales is None or kind is None:
            return key, value
        self._read |= {*quantization.kv_scale_names(layer)}
        if not self._simulate:
            return key, value
        return CACHES[kind](key, scales[0]), CACHES[kind](value, scales[1])

    def unread(self) -> list[str]:
        """The tensors of the files that nothing has asked for."""
        names = (name for name in self._checkpoint.tensors if not name.endswith(_FOLLOWS_FROM_CONFIG))
        return sorted(set(names) - self._read)

    def _apply(self, x: Node, name: str, stored: str) -> Node:
        layer = self._checkpoint.linear(name)
        self._read |= self._parts(layer, stored)
        return self._product(x, replace(layer, name=stored))

    def _product(self, x: Node, layer: LinearLayer) -> Node:
        product = self._linears.product(x, layer, f"{layer.name}.weight")
        if layer.bias is None:
            return product
        return ops.add(product, widen(self.constants.add(layer.bias, f"{layer.name}.bias")))

    def _split(self, x: Node, layer: LinearLayer, sizes: Sequence[int]) -> list[Node]:
        """Outputs of a layer in parts of these sizes; what it is padded with is left."""
        longer, name = padded(layer), f"{layer.name}.weight"
        product = self._product(x, longer)
        if longer.shape == layer.shape and len(sizes) == 1:
            return [product]
        if longer.shape != layer.shape:
            held = (name, f"{name}_scale", f"{name}_shape", f"{layer.name}.bias")
            self.padded |= dict.fromkeys(held, layer.shape[0])
        return parts(product, sizes)

    @staticmethod
    def _parts(layer: LinearLayer, stored: str) -> set[str]:
        """Names of the tensors that a layer may be made of."""
        parts = ("weight", "bias") if layer.format is Format.NONE else PARTS
        return {f"{stored}.{part}" for part in parts}

    def _plain(self, name: str) -> Node:
        self._read.add(name)
        return self.constants.add(self._checkpoint.tensors[name], name)


def _expert(layer: LinearLayer) -> Array:
    """[out, in]: as it is stored, or by its scales."""
    if layer.format is Format.NONE:
        return layer.weight
    scales, (rows, columns) = layer.scales(), layer.shape
    codes = layer.codes().astype(np.float32).reshape(rows, scales.shape[1], -1)
    weight: Array = (codes * scales[:, :, None]).reshape(rows, columns)
    return weight if layer.pre_quant_scale is None else weight * layer.pre_quant_scale.astype(np.float32)


class Linears:
    """Builds the products of one model; inputs that several layers share are scaled and rounded once."""

    def __init__(self, constants: Constants, *, round_inputs: bool) -> None:
        self._constants, self._round = constants, round_inputs
        self._inputs: dict[tuple[object, ...], Node] = {}

    def product(self, x: Node, layer: LinearLayer, name: str) -> Node:
        """[..., in] f32 -> [..., out] f32, without the bias; `name` is that of the weight's tensor."""
        match layer.format:
            case Format.NONE:
                return _matmul(x, widen(self._constants.add(layer.weight, name)))
            case Format.FP8 | Format.FP8_ROW:
                return self._fp8(x, layer, name)
            case Format.INT8_SQ | Format.INT8_ROW:
                weight = widen(self._constants.add(layer.weight, name))
                scaled = ops.multiply(weight, named(f32(layer.scales()), f"{name}_scale"))
                return _matmul(self._input(x, layer), scaled)
            case Format.W4A8_AWQ if self._round:
                return self._fp8(x, _as_fp8(layer), name)
            case _:
                return _matmul(self._input(x, layer), self._grouped(layer, name))

    def _fp8(self, x: Node, layer: LinearLayer, name: str) -> Node:
        scale = layer.scales().reshape(-1)  # one, or one for each output
        if self._round and layer.input_scale is not None:
            scale = scale * np.float32(_input_scale(layer))
        # Exact. OpenVINO would fold e4m3 matrices to f32 on load, and keep those beside what its kernel packs.
        weight = self._constants.add(layer.weight.astype(ml_dtypes.bfloat16), name)
        product = _matmul(self._input(x, layer), widen(weight))
        return ops.multiply(product, named(f32(scale), f"{name}_scale"))

    def _grouped(self, layer: LinearLayer, name: str) -> Node:
        codes, scales = layer.codes(), layer.scales()
        rows, columns = codes.shape
        size = columns // scales.shape[1]
        if layer.groups is not None:  # neighbours share a scale once the columns are sorted, as inputs are
            codes = np.ascontiguousarray(codes[:, np.argsort(layer.groups, kind="stable")])
        if layer.format in FP4:  # halves from -6 to 6
            codes, scales = (2 * codes).astype(np.int8), scales / 2
        if layer.zeros is not None:
            codes = codes - np.repeat(layer.zeros, size, axis=1)
        if layer.format in (*AWQ, Format.INT4):
            constant = self._constants.add_int4(codes, size, name)
        else:
            constant = self._constants.add(codes.reshape(rows, -1, size), name)
        weight = ops.multiply(widen(constant), named(f32(scales[:, :, None]), f"{name}_scale"))
        return ops.reshape(weight, named(i64(layer.shape), f"{name}_shape"), special_zero=False)

    def _input(self, x: Node, layer: LinearLayer) -> Node:
        """x, scaled and rounded as the layer wants it: for e4m3 with an `input_scale` the codes, without that."""
        before = b"" if layer.pre_quant_scale is None else layer.pre_quant_scale.tobytes()
        order = b"" if layer.groups is None else layer.groups.tobytes()
        scale = _input_scale(layer) if self._round and layer.input_scale is not None else None
        dynamic = layer.dynamic if self._round and scale is None else ""
        whole = layer.format in (Format.INT8_SQ, Format.INT8_ROW, Format.INT8_GROUP)
        key = (x.get_name(), before, order, scale, dynamic)
        if key not in self._inputs:
            if layer.pre_quant_scale is not None:
                x = ops.multiply(x, f32(layer.pre_quant_scale.astype(np.float32)))
            if layer.groups is not None:
                x = ops.gather(x, i64(np.argsort(layer.groups, kind="stable").tolist()), i64(-1))
            if dynamic:
                x = round_by_token(x, whole=dynamic == "int8")
            elif scale is not None:
                x = quantize_int8(x, scale) if whole else to_e4m3(x, scale)
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


_TYPES = {
    np.dtype(np.float32): Type.f32,
    np.dtype(np.float16): Type.f16,
    np.dtype(ml_dtypes.bfloat16): Type.bf16,
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
        """`array` as it is: f32, f16, bf16 or i8."""
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


CACHES = {"FP8": round_e4m3, "INT8": round_int8}
