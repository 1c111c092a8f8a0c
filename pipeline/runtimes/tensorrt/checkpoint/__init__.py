"""The convert stage: an unquantized checkpoint, split into the ranks of a TensorRT-LLM checkpoint.

Calibration uses `split` for the families that ModelOpt does not export, and `describe` to repair what it exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import UserError
from pipeline.models import CheckpointReader, Format
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Progress
from pipeline.runtimes.tensorrt.checkpoint.config import MODEL_TYPES, ROPES, describe
from pipeline.runtimes.tensorrt.checkpoint.joining import RankCheckpoint
from pipeline.runtimes.tensorrt.checkpoint.splitting import FORMATS, split
from pipeline.store import Json

__all__ = ["FORMATS", "MODEL_TYPES", "ROPES", "RankCheckpoint", "convert", "describe", "split"]


def convert(checkpoint: Path, sizes: Parallelism, *, into: Path, progress: Progress) -> Mapping[str, Json]:
    """Write `into`/`sizes.folder`: config.json and one safetensors file a rank; return the facts of it.

    Returns:
        Ranks, bytes of all of them, type of the weights, and tensors in a rank.

    Raises:
        InvalidInput: The sizes do not divide the model.
        UserError: It is quantized.
        StageError: Weights are missing, or not of their types.
        CheckpointError: The checkpoint cannot be read, or what was written is not as asked for.
    """
    source = CheckpointReader(checkpoint)
    if source.quantization.format is not Format.NONE:
        raise UserError(
            f"{checkpoint} is quantized already ({source.quantization.format}): engines are built from a checkpoint"
            " that `quantization.format` calibrates, or from an unquantized one"
        )
    return split(source, sizes, into / sizes.folder, progress)
