"""A checkpoint in the Hugging Face layout: its architecture, quantization and layers, and every fault of its files.

Faults are found from headers first and values last; nothing is repaired. Reading a layer that lacks a tensor, or whose
tensors do not fit, is an error that names the tensor: transformers loads such a file with random or unscaled weights
and a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import CheckpointError
from pipeline.models import compressed
from pipeline.models.architecture import Architecture, LinearShape
from pipeline.models.compressed import FLOATS, Layout
from pipeline.models.layers import MX_GROUP, NV_GROUP, LinearLayer
from pipeline.models.published import StoredFormat
from pipeline.models.quantization import AWQ, GROUPED, INTEGERS, CheckpointQuantization, Format
from pipeline.models.tensors import Array, DecoderTensors, TensorFiles, TensorKind, TensorMap


class CheckpointReader:
    """The files of one model, quantized or not."""

    directory: Path
    architecture: Architecture
    quantization: CheckpointQuantization
    tensors: TensorMap

    def __init__(self, directory: Path) -> None:
        """Open a checkpoint. Values of tensors are not read yet; `check` looks for faults.

        Raises:
            InvalidInput: with every reason why the model cannot be built.
            SourceError: there is no config.json.
            CheckpointError: the quantization is not known, or a file of tensors is missing or damaged.
            UnreadableFile: a file cannot be read.
        """
        self.directory = directory
        self.architecture = Architecture.read(directory)
        self.quantization = CheckpointQuantization.read(directory)
        files = TensorFiles(directory)
        composed = self.architecture.class_name.endswith("ForConditionalGeneration")
        self.tensors = DecoderTensors(files) if composed else files

    @property
    def has_integers(self) -> bool:
        """Whether the weights of all blocks are whole numbers of 8 bits or fewer, so that inputs may be rounded, too.

        Experts and capped attention are computed by other kernels of the `cpu` runtime.
        """
        kinds = {self.quantization.format_of(shape.name) for shape in self.architecture.linears()}
        cap = self.architecture.attention_cap
        return kinds <= {*INTEGERS} and not self.architecture.experts and cap is None

    def linear(self, name: str) -> LinearLayer:
        """Read a linear layer by its name; `lm_head` is the embedding where the two are tied.

        Raises:
            CheckpointError: a tensor of it is missing or does not fit; the text names it.
            KeyError: the model has no such layer.
        """
        shape = self._shapes[name]
        stored = self.stored_name(shape)
        how, packed = self.quantization.stored(name), self.quantization.compressed
        form = Format(how.name)
        faults = layer_faults(shape, stored, how, self.tensors.headers, compressed_tensors=packed)
        if faults:
            raise CheckpointError(
                "\n".join([f"{self.directory}: {name} is damaged", *(f"  {f}" for f in faults)])
            )
        parts: dict[str, Any] = {
            part: self.tensors[tensor]
            for part, tensor in tensor_names(stored).items()
            if tensor in self.tensors and (form is not Format.NONE or part in ("weight", "bias"))
        }
        if packed and form is not Format.NONE:
            return compressed.unpack(name, shape, how, parts)
        return LinearLayer(name=name, format=form, group_size=how.group or None, **parts)

    def expert(self, name: str, index: int) -> LinearLayer:
        """Read a projection of one expert from a tensor of all experts ("model.layers.0.mlp.experts.down_proj").

        Raises:
            CheckpointError: a tensor is missing; the text names it.
        """
        how = self.quantization.stored(name)
        parts = {part: f"{name}{end}" for part, end in _stacked_parts(Format(how.name)).items()}
        absent = [tensor for tensor in parts.values() if tensor not in self.tensors]
        if absent:
            raise CheckpointError(f"{self.directory} lacks {', '.join(absent)}")
        read: dict[str, Any] = {part: self.tensors[tensor] for part, tensor in parts.items()}
        read = {part: tensor[index] if tensor.ndim > 1 else tensor for part, tensor in read.items()}
        if how.name == Format.MXFP4:
            read["weight"] = read["weight"].reshape(len(read["weight"]), -1)
            read["weight_scale"] = np.ldexp(np.float32(1), read["weight_scale"].astype(np.int32) - 127)
        else:
            read |= {part: read[part].T for part in ("weight", "weight_scale") if part in read}
        return LinearLayer(name=name, format=Format(how.name), group_size=how.group or None, **read)

    def array(self, name: str) -> Array:
        """Read a tensor that is never quantized (norm, embedding) as float32. Raises CheckpointError if absent."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory} lacks {name}")
        return self.tensors[name].astype(np.float32)

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        """Read the scales of keys and values of a layer's FP8 cache; None where the cache is not quantized.

        Raises:
            CheckpointError: a scale is missing.
            ValueError: a scale is more than one number.
        """
        if self.quantization.kv_cache is None:
            return None
        key, value = (self.array(name) for name in self.quantization.kv_scale_names(layer))
        return float(key.reshape(())), float(value.reshape(()))

    def faults(self) -> list[str]:
        """List everything that is wrong with the files: absent or unexpected tensors, types, shapes, values."""
        return faults_of(self.architecture, self.quantization, self.tensors)

    def check(self) -> None:
        """Raise CheckpointError with all faults, if there are any."""
        faults = self.faults()
        if faults:
            count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
            raise CheckpointError(
                "\n".join([f"{self.directory}: {count}", *(f"  {fault}" for fault in faults)])
            )

    def stored_name(self, shape: LinearShape) -> str:
        """Return the name under which a layer's weight is stored; a tied output projection shares the embedding's."""
        tied = self.architecture.tied and shape.name == "lm_head" and "lm_head.weight" not in self.tensors
        return "model.embed_tokens" if tied else shape.name

    @cached_property
    def _shapes(self) -> Mapping[str, LinearShape]:
        # A model with many experts has tens of thousands.
        shapes = (*self.architecture.linears(), self.architecture.output_projection())
        return {shape.name: shape for shape in shapes}


PARTS = (
    "weight", "bias", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", *compressed.PARTS,
)  # fmt: skip
_GREATEST_MX_SCALE = 252  # 6, the greatest e2m1 number, times 2^(252 - 127) is finite
_IGNORED = ("rotary_emb.inv_freq",)  # old checkpoints carry it; it follows from the configuration


def tensor_names(layer: str) -> dict[str, str]:
    """Map the parts of a layer to the names of their tensors."""
    return {part: f"{layer}.{part}" for part in PARTS}


def faults_of(
    architecture: Architecture, quantization: CheckpointQuantization, tensors: TensorMap
) -> list[str]:
    """List all faults of a checkpoint, in the order of the layers."""
    headers = tensors.headers

    def tensor_faults(name: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> list[str]:
        return _mismatch(headers[name], dtypes, shapes) if name in headers else [f"{name} is missing"]

    faults: list[str] = []
    expected = {architecture.embedding}
    faults += tensor_faults(architecture.embedding, FLOATS, ((architecture.vocab, architecture.hidden),))
    for name, size in architecture.vectors():
        expected.add(name)
        faults += tensor_faults(name, FLOATS, ((size,),))
    layers = list(architecture.linears())
    if not architecture.tied or "lm_head.weight" in headers:
        layers.append(architecture.output_projection())
    for layer in layers:
        how, packed = quantization.stored(layer.name), quantization.compressed
        expected |= set(tensor_names(layer.name).values())
        faults += layer_faults(layer, layer.name, how, headers, compressed_tensors=packed)
    if quantization.kv_cache is not None:
        for layer_index in range(architecture.layers):
            for name in quantization.kv_scale_names(layer_index):
                expected.add(name)
                faults += tensor_faults(name, FLOATS if quantization.compressed else ("F32",), _SCALAR)
    for shape in architecture.stacked_experts():
        wanted = stacked_layout(shape, architecture.experts, quantization.format_of(shape.name))
        expected |= set(wanted)
        for name, (dtypes, shapes) in wanted.items():
            faults += tensor_faults(name, dtypes, shapes)
    faults += _fusion_faults(architecture, quantization, headers)
    faults += [
        f"{name} is not expected" for name in headers if name not in expected and not name.endswith(_IGNORED)
    ]
    return faults + [fault for name in headers for fault in _value_faults(name, tensors[name])]


def layer_faults(
    layer: LinearShape,
    stored: str,
    how: StoredFormat,
    headers: Mapping[str, TensorKind],
    *,
    compressed_tensors: bool = False,
) -> list[str]:
    """List the faults of the headers of one linear layer."""
    names = tensor_names(stored)
    faults: list[str] = []
    form = Format(how.name)
    whole_rows = compressed_tensors and not 0 < how.group < layer.columns
    if not whole_rows and (form in GROUPED or how.group) and (not how.group or layer.columns % how.group):
        return [f"{layer.name}: {layer.columns} columns do not divide into groups of {how.group or None}"]
    wanted = dict(_layout(layer, form, how.group))
    if compressed_tensors and form is not Format.NONE:
        parts = frozenset(part for part in PARTS if names[part] in headers)
        wanted = {part: layout for part, layout in wanted.items() if part == "bias"}
        wanted |= compressed.layout(layer, how, parts)
    for part, (dtypes, shapes, needed) in wanted.items():
        header = headers.get(names[part])
        if header is None:
            faults += [f"{names[part]} is missing"] if needed else []
        else:
            faults += _mismatch(header, dtypes, shapes)
    for part in PARTS:
        if part not in wanted and names[part] in headers:
            faults.append(f"{names[part]} is not expected in {form} weights")
    return faults


def stacked_layout(
    shape: LinearShape, experts: int, form: Format
) -> dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """Map the tensors that hold a projection of all experts of a layer to their types and shapes.

    Args:
        shape: One expert's.
    """
    rows, columns = shape.rows, shape.columns
    layout: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {
        "bias": (FLOATS, ((experts, rows),)),
        "weight": (FLOATS, ((experts, columns, rows),)),
        "weight_scale_2": (("F32",), _SCALAR),
        "input_scale": (("F32",), _SCALAR),
    }
    if form is Format.MXFP4:
        groups = columns // MX_GROUP
        layout["weight"] = (("U8",), ((experts, rows, groups, MX_GROUP // 2),))
        layout["weight_scale"] = (("U8",), ((experts, rows, groups),))
    elif form is not Format.NONE:
        layout["weight"] = (("U8",), ((experts, columns // 2, rows),))
        layout["weight_scale"] = (("F8_E4M3",), ((experts, columns // NV_GROUP, rows),))
    return {f"{shape.name}{end}": layout[part] for part, end in _stacked_parts(form).items()}


def _stacked_parts(form: Format) -> dict[str, str]:
    """Map the parts of a projection of all experts to the ends of their tensors' names.

    Source: GptOssExperts of transformers 5.14, openai/gpt-oss-20b, and ModelOpt 0.47's export of it.
    """
    if form is Format.NONE:
        return {"weight": "", "bias": "_bias"}
    if form is Format.MXFP4:
        return {"weight": "_blocks", "weight_scale": "_scales", "bias": "_bias"}
    if form not in (Format.NVFP4, Format.W4A16_NVFP4):
        raise CheckpointError(f"experts in one tensor are not read in {form}")
    parts = ("weight_scale", "weight_scale_2", *(("input_scale",) if form is Format.NVFP4 else ()))
    return {"weight": "", "bias": "_bias", **{part: f"_{part}" for part in parts}}


_SCALAR = ((), (1,))


def _layout(layer: LinearShape, form: Format, group_size: int) -> Iterator[tuple[str, Layout]]:
    rows, columns = layer.rows, layer.columns
    groups = columns // group_size if group_size else 0
    if layer.bias:
        yield "bias", (FLOATS, ((rows,),), True)
    if form is Format.NONE:
        yield "weight", (FLOATS, ((rows, columns),), True)
        return
    if form is Format.FP8:
        yield "weight", (("F8_E4M3",), ((rows, columns),), True)
        yield "weight_scale", (("F32",), _SCALAR, True)
    elif form in AWQ:
        yield "weight", (("U8", "I8"), ((rows // 2, columns),), True)
        yield "weight_scale", (("F32",), ((rows, groups),), True)
        # The others' is folded into the norm before them.
        yield "pre_quant_scale", (FLOATS, ((columns,),), layer.name.endswith((".o_proj", ".down_proj")))
    elif form is Format.INT8_SQ:
        yield "weight", (("I8",), ((rows, columns),), True)
        yield "weight_scale", (("F32",), ((rows,),), True)
        yield "pre_quant_scale", (FLOATS, ((columns,),), True)
    else:
        yield "weight", (("U8",), ((rows, columns // 2),), True)
        yield "weight_scale", (("F8_E4M3",), ((rows, groups),), True)
    if form in (Format.W4A8_AWQ, Format.NVFP4, Format.W4A16_NVFP4):
        yield "weight_scale_2", (("F32",), _SCALAR, True)
    if form not in (Format.INT4_AWQ, Format.W4A16_NVFP4):
        yield "input_scale", (("F32",), _SCALAR, True)


def _mismatch(header: TensorKind, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> list[str]:
    faults = []
    if header.dtype not in dtypes:
        faults.append(f"{header.name} is {header.dtype}, not {' or '.join(dtypes)}")
    if header.shape not in shapes:
        faults.append(f"{header.name} has shape {list(header.shape)}, not {list(shapes[0])}")
    return faults


def _fusion_faults(
    architecture: Architecture, quantization: CheckpointQuantization, headers: Mapping[str, TensorKind]
) -> Iterator[str]:
    """Layers that read the same input are scaled alike: all of them hold a pre_quant_scale, or none."""
    if quantization.format is Format.NONE:
        return
    for layer in range(architecture.layers):
        block = f"model.layers.{layer}."
        for group in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            has_scale = [f"{block}{name}.pre_quant_scale" in headers for name in group]
            if any(has_scale) and not all(has_scale):
                yield f"{block}: only some of {', '.join(group)} hold a pre_quant_scale"


def _value_faults(name: str, values: Array) -> Iterator[str]:
    if name.endswith("_scales") and values.dtype == np.uint8 and (values > _GREATEST_MX_SCALE).any():
        yield f"{name} holds scales beyond those of float32"
    if values.dtype.kind in "iub":
        return
    numbers = values.astype(np.float32)
    if not np.isfinite(numbers).all():
        yield f"{name} holds values that are not finite"
    elif "scale" in name.rsplit(".", 1)[-1] and not (numbers > 0).all():
        yield f"{name} holds scales that are not positive"
