"""ModelOpt's own fake-quantized model beside the files that were exported from it, in float32 throughout.

Nothing is rounded to 16 bits on the way, so that the two can be compared to the last digits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.models import Architecture, CheckpointReader, Format
from pipeline.progress import Silent
from pipeline.stages.calibrate import unified
from pipeline.stages.calibrate.measurement import make_batches, measure
from pipeline.stages.calibrate.model import load
from pipeline.stages.calibrate.third_party import Notes, quietly
from pipeline.stages.dataset.freezing import read_samples
from pipeline.stages.torch_device import torch_threads_for
from tests.support.calibrated import Calibrations


@dataclass(frozen=True)
class Pair:
    """One calibration, twice."""

    model: Any  # quantizers in place, what shares an input smoothed and scaled alike as the export does it
    exported: CheckpointReader
    source: Path


def make_pair(calibrations: Calibrations, into: Path, architecture: str, form: Format, kv_cache: str) -> Pair:
    source = calibrations.source(architecture, "float32")
    samples = read_samples(calibrations.dataset() / "calibration.jsonl", 512)
    notes = Notes()
    with quietly("making a pair", notes), torch_threads_for(0):
        import modelopt.torch.export  # noqa: F401
        from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

        model = load(source, Architecture.read(source), "cpu")
        measure(
            model,
            form,
            awq_block_size=64,
            kv_cache=kv_cache,
            batches=make_batches(samples, 500),
            progress=Silent(),
        )
        unified.align(model, torch.float32)
        fused = copy.deepcopy(model)
        requantize_resmooth_fused_llm_layers(fused)
        unified.export(model, source, into)
    assert notes.warnings == []
    return Pair(fused, CheckpointReader(into), source)
