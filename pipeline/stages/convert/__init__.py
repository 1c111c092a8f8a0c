"""The convert stage: an unquantized checkpoint, split into the ranks of a TensorRT-LLM checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import UserError
from pipeline.planning.parallelism import Parallelism
from pipeline.progress import Progress
from pipeline.store import Json


def convert(checkpoint: Path, sizes: Parallelism, *, into: Path, progress: Progress) -> Mapping[str, Json]:  # noqa: ARG001
    """Write `into`/`sizes.folder`: config.json and one safetensors file a rank; the facts of it."""
    raise UserError(f"{checkpoint}: checkpoints are not split for {sizes.folder} yet")
