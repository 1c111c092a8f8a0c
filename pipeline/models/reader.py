"""A checkpoint in the Hugging Face layout: its architecture, its quantization, and its layers.

Reading a layer that lacks a tensor, or whose tensors do not fit, is an error that names the tensor:
transformers loads such a file with random or unscaled weights and a warning.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.errors import CheckpointError
from pipeline.models.architecture import Architecture, LinearShape
from pipeline.models.inspection import faults_of, layer_faults, tensor_names
from pipeline.models.layers import LinearLayer
from pipeline.models.quantization import Format, Quantization
from pipeline.models.tensors import Array, TensorFiles, Tensors


class Checkpoint:
    """The files of one model, quantized or not."""

    directory: Path
    architecture: Architecture
    quantization: Quantization
    tensors: Tensors

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.architecture = Architecture.read(directory)
        self.quantization = Quantization.read(directory)
        self.tensors = TensorFiles(directory)

    def linear(self, name: str) -> LinearLayer:
        """A linear layer by its name; `lm_head` is the embedding where the two are tied."""
        shape = self._shape(name)
        stored = self.stored_name(shape)
        form = self.quantization.format_of(name)
        faults = layer_faults(shape, stored, form, self.quantization.group_size, self.tensors.headers)
        if faults:
            raise CheckpointError(
                "\n".join([f"{self.directory}: {name} is damaged", *(f"  {f}" for f in faults)])
            )
        parts = {
            part: self.tensors[tensor]
            for part, tensor in tensor_names(stored).items()
            if tensor in self.tensors and (form is not Format.NONE or part in ("weight", "bias"))
        }
        return LinearLayer(name=name, format=form, group_size=self.quantization.group_size, **parts)

    def array(self, name: str) -> Array:
        """A tensor that is never quantized (norms, embedding) as float32."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory} lacks {name}")
        return self.tensors[name].astype(np.float32)

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        """Scales of the keys and the values of a layer's FP8 cache; None where the cache is not quantized."""
        if self.quantization.kv_cache is None:
            return None
        block = f"model.layers.{layer}.self_attn."
        key, value = (self.array(block + name) for name in ("k_proj.k_scale", "v_proj.v_scale"))
        return float(key.reshape(())), float(value.reshape(()))

    def faults(self) -> list[str]:
        """Everything that is wrong with the files: absent or unexpected tensors, types, shapes, values."""
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
        """Where a layer's weight is kept: a tied output projection shares the embedding's."""
        tied = self.architecture.tied and shape.name == "lm_head" and "lm_head.weight" not in self.tensors
        return "model.embed_tokens" if tied else shape.name

    def _shape(self, name: str) -> LinearShape:
        for shape in (*self.architecture.linears(), self.architecture.output_projection()):
            if shape.name == name:
                return shape
        raise KeyError(name)
