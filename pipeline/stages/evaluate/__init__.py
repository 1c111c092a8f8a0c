"""How far a quantized checkpoint is from its original on held-out text, and whether that is near enough.

    metrics = evaluate(reference, exported, heldout, into=…)     measures; needs torch
    verdict = judge(metrics, gate)                               decides; pure
    write_report(metrics, verdict, folder)                       report.json and report.html

Torch is imported by `evaluate` alone, when it is called.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.progress import Progress
from pipeline.stages.evaluate.metrics import Metrics, read_metrics
from pipeline.stages.evaluate.report import write_report
from pipeline.stages.evaluate.verdict import Check, Verdict, judge
from pipeline.store import Json


def evaluate(
    reference_dir: Path,
    exported_dir: Path,
    heldout: Path,
    *,
    into: Path,
    progress: Progress,
    device: str | None = None,
) -> dict[str, Json]:
    """Compare the exported checkpoint with the original, position by position; metrics.json into `into`.

    Every token of a held-out sample but its first is predicted and counted; nothing is padded. Both
    checkpoints are read from their files, with the scales that they hold, and computed in float32.

    Args:
        heldout: one {"tokens": […]} a line.
        device: "cpu" or "cuda"; by default a GPU if there is one.

    Raises:
        CheckpointError: a checkpoint is damaged (a scale missing, a wrong shape, values that are not finite).
        StageError: the exported checkpoint computes something that is not a number.
    """
    from pipeline.stages.evaluate.comparison import compare

    return compare(reference_dir, exported_dir, heldout, into=into, progress=progress, device=device)


__all__ = ["Check", "Metrics", "Verdict", "evaluate", "judge", "read_metrics", "write_report"]
