"""A checkpoint read from its files: what the model is, and each layer with its scales. No torch.

checkpoint = Checkpoint(directory)
checkpoint.architecture                       # sizes, rotary embedding, which biases and norms there are
checkpoint.linear("model.layers.0.mlp.up_proj").dequantize()      # float32 [out, in]
checkpoint.faults()                           # everything that is missing, of the wrong shape, or not finite
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.models.architecture import Architecture, LinearShape
    from pipeline.models.layers import LinearLayer
    from pipeline.models.quantization import CheckpointQuantization, Format
    from pipeline.models.reader import CheckpointReader
    from pipeline.models.rope import Rope
    from pipeline.models.tensors import TensorFiles

__all__ = [
    "Architecture",
    "CheckpointQuantization",
    "CheckpointReader",
    "Format",
    "LinearLayer",
    "LinearShape",
    "Rope",
    "TensorFiles",
]

# Name -> module. They are imported when asked for: a look at config.json needs no numpy.
_HOMES = {
    "Architecture": "architecture",
    "CheckpointQuantization": "quantization",
    "CheckpointReader": "reader",
    "Format": "quantization",
    "LinearLayer": "layers",
    "LinearShape": "architecture",
    "Rope": "rope",
    "TensorFiles": "tensors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
