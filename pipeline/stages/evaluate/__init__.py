"""How far a quantized checkpoint is from its original on held-out text, and whether that is near enough.

    evaluate(reference, [Export(calibrated / "trtllm-tp1")], heldout, into=…)     measures; needs torch
    metrics = read_metrics(folder)                                                one for each export
    verdict = judge(metrics, gate)                                                decides; pure
    write_report(metrics, verdict, folder)                                        report.json and report.html

Torch is imported by `evaluate` alone, when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.progress import Progress
from pipeline.stages.evaluate.gate import write_report
from pipeline.stages.evaluate.metrics import EvaluationMetrics, Export, read_metrics, write_metrics
from pipeline.stages.evaluate.verdict import GateCheck, GateVerdict, judge
from pipeline.store import Json


def evaluate(
    reference_dir: Path,
    exports: Sequence[Export],
    heldout: Path,
    *,
    into: Path,
    progress: Progress,
    device: str | None = None,
) -> dict[str, Json]:
    """Compare exported checkpoints with the original, position by position; metrics.json into `into`.

    Every token of a held-out sample but its first is predicted and counted; nothing is padded. All checkpoints are read
    from their files, with the scales that they hold, and computed in float32.

    Args:
        reference_dir: The original, in the Hugging Face layout.
        exports: What is compared with it.
        heldout: One {"tokens": […]} a line.
        into: Folder for metrics.json.
        progress: Where it is said how far the work is.
        device: "cpu" or "cuda"; by default a GPU if there is one.

    Returns:
        The figures of each export by the name of its folder; the device, and the seconds that it took.

    Raises:
        CheckpointError: A checkpoint is damaged (a scale missing, a wrong shape, values that are not finite).
        StageError: An exported checkpoint computes something that is not a number.
    """
    from pipeline.stages.evaluate.comparison import compare

    return compare(reference_dir, exports, heldout, into=into, progress=progress, device=device)


__all__ = [
    "EvaluationMetrics",
    "Export",
    "GateCheck",
    "GateVerdict",
    "evaluate",
    "judge",
    "read_metrics",
    "write_metrics",
    "write_report",
]
