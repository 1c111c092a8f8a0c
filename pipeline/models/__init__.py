"""A checkpoint read from its files: what the model is, and each layer with its scales. No torch.

checkpoint = Checkpoint(directory)
checkpoint.architecture                       # sizes, rotary embedding, which biases and norms there are
checkpoint.linear("model.layers.0.mlp.up_proj").dequantize()      # float32 [out, in]
checkpoint.faults()                           # everything that is missing, of the wrong shape, or not finite
"""

from pipeline.models.architecture import Architecture, LinearShape
from pipeline.models.layers import LinearLayer
from pipeline.models.quantization import CheckpointQuantization, Format
from pipeline.models.reader import CheckpointReader
from pipeline.models.rope import Rope
from pipeline.models.tensors import TensorFiles, TensorHeader

__all__ = [
    "Architecture",
    "CheckpointQuantization",
    "CheckpointReader",
    "Format",
    "LinearLayer",
    "LinearShape",
    "Rope",
    "TensorFiles",
    "TensorHeader",
]
