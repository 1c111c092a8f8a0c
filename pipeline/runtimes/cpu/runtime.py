"""The `cpu` runtime: OpenVINO models with the calibrated weights, run by our paged engine behind real Triton."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline import resources
from pipeline.progress import Progress
from pipeline.recipe import CpuRuntime as Settings
from pipeline.recipe import Recipe
from pipeline.runtimes.base import Engines
from pipeline.store import Json

_ENGINE = Path(__file__).parent / "engine"


class CpuRuntime:
    """See `pipeline.runtimes.base.Runtime`."""

    packages = ("openvino",)

    def build_settings(self, recipe: Recipe) -> Mapping[str, Json]:
        settings = _settings(recipe)
        return {
            "runtime": "cpu",
            "precision": settings.precision,
            "simulate_activations": settings.simulate_activations,
        }

    def build(self, recipe: Recipe, checkpoint: Path, into: Path, progress: Progress) -> Mapping[str, Json]:
        from pipeline.runtimes.cpu.ir import build_ir

        settings = _settings(recipe)
        return build_ir(
            checkpoint,
            into,
            precision=settings.precision,
            simulate_activations=settings.simulate_activations,
            progress=progress,
        )
