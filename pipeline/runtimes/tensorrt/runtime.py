"""The `tensorrt` runtime of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.models.sizes import ModelSizes
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.runtimes.base import Engines, Order
from pipeline.store import Json
from pipeline.triton.deployment import Deployment


class TensorRTRuntime:
    """See `pipeline.runtimes.base.Runtime`."""

    packages = ()

    def build_settings(self, recipe: Recipe, role: str) -> Mapping[str, Json]:
        from pipeline.runtimes.tensorrt.building import build_settings

        return build_settings(recipe, role)

    def build(self, order: Order) -> Mapping[str, Json]:
        from pipeline.runtimes.tensorrt.building import build

        return build(order)

    def foresee(self, recipe: Recipe, sizes: Mapping[str, ModelSizes]) -> Deployment:
        from pipeline.runtimes.tensorrt.packaging import foresee

        return foresee(recipe, sizes)

    def package_settings(self, recipe: Recipe) -> Mapping[str, Json]:
        from pipeline.runtimes.tensorrt.packaging import package_settings

        return package_settings(recipe)

    def package(self, recipe: Recipe, engines: Engines, into: Path, progress: Progress) -> Mapping[str, Json]:
        from pipeline.runtimes.tensorrt.packaging import package

        return package(recipe, engines, into, progress)
