"""The calibration itself: ModelOpt's quantizers watch the samples go by."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from pipeline.models import Format
from pipeline.progress import Progress
from pipeline.stages.calibrate.batches import Batch, forward
from pipeline.stages.calibrate.experts import all_experts
from pipeline.stages.calibrate.formats import PASSES, modelopt_config


def measure(
    model: Any,
    form: Format,
    *,
    awq_block_size: int,
    kv_cache: str,
    batches: Sequence[Batch],
    progress: Progress,
) -> list[float]:
    """Insert the quantizers and measure their scales; the seconds of each pass over the samples."""
    import modelopt.torch.quantization as mtq

    seconds: list[float] = []
    samples = sum(batch.samples for batch in batches)

    def read_samples(model: Any) -> None:
        began = time.monotonic()
        label = f"calibrate {form}, pass {len(seconds) + 1} of {PASSES[form]}"
        with progress.task(label, samples, "samples") as task:
            for batch in batches:
                forward(model, batch)
                task.advance(batch.samples)
        seconds.append(round(time.monotonic() - began, 2))

    torch.manual_seed(0)
    with torch.no_grad(), all_experts(model):
        mtq.quantize(model, modelopt_config(form, awq_block_size, kv_cache), read_samples)
    return seconds
