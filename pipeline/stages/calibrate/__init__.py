"""Measure the scales of a checkpoint with NVIDIA ModelOpt, and export it for the engines.

    calibrate(checkpoint, dataset, quantization, exports=[Parallelism(1), Parallelism(2)], into=folder,
    progress=progress)

leaves `hf/` (a unified Hugging Face checkpoint), `trtllm-tp1/`, `trtllm-tp2/` (TensorRT-LLM checkpoints) and
calibration.json. What was written is read again and judged. Written against ModelOpt 0.47, torch 2.13 and
transformers 5.14, which are imported when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Progress
from pipeline.recipe import Quantization
from pipeline.store import Json


def calibrate(
    checkpoint_dir: Path,
    dataset_dir: Path | None,
    quantization: Quantization,
    *,
    exports: Sequence[Parallelism],
    into: Path,
    progress: Progress,
    device: str | None = None,
) -> dict[str, Json]:
    """Quantize a checkpoint and write its exports into the folder `into`; returns the facts.

    Args:
        dataset_dir: what `stages.dataset.freeze` left; may be None for format `none`, which measures nothing.
        exports: sizes of each TensorRT-LLM checkpoint to write; may be empty.
        device: "cpu" or "cuda"; by default a GPU if there is one.

    Raises:
        UserError: the model, the format or the parallelism cannot be done; found before the model is loaded.
        StageError: ModelOpt failed, or a scale or a file is not as it must be; everything that is wrong is
        listed.
    """
    from pipeline.stages.calibrate.calibration import run

    return run(
        checkpoint_dir,
        dataset_dir,
        quantization,
        exports=exports,
        into=into,
        progress=progress,
        device=device,
    )


__all__ = ["calibrate"]
