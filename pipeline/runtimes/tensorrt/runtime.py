"""The `tensorrt` runtime: what a package depends on, and how it is put together from built engines.

How an engine is built is in `building`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline import resources
from pipeline.contracts import engine_memory
from pipeline.contracts.gpus import gpu
from pipeline.contracts.releases import container, require_runtime
from pipeline.models.sizes import ModelSizes
from pipeline.models.token_ids import TokenIds
from pipeline.plan.parallelism import parallelism
from pipeline.plan.plan import DRAFT, TARGET
from pipeline.plan.preflight.needs import weight_bytes
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.runtimes.base import EngineBuildRequest, Engines, preview
from pipeline.runtimes.tensorrt import building
from pipeline.runtimes.tensorrt.building import ENGINE
from pipeline.runtimes.tensorrt.engine_folder import EngineFolder
from pipeline.runtimes.tensorrt.flags import runtime_settings
from pipeline.runtimes.tensorrt.model_repository import (
    EngineModelSettings,
    engine_models,
    launch_spec,
    package_engines,
)
from pipeline.runtimes.tensorrt.triton_settings import engine_settings, settings_of
from pipeline.store import Json
from pipeline.triton.deployment import Deployment, DeploymentLimits, Requirements
from pipeline.triton.repository import source_digest


class TensorRTBackend:
    """See `pipeline.runtimes.base.Runtime`."""

    packages = ()

    def build_settings(self, recipe: Recipe, role: str) -> Mapping[str, Json]:
        return building.build_settings(recipe, role)

    def build(self, inputs: EngineBuildRequest) -> Mapping[str, Json]:
        return building.build(inputs)

    def preview_deployment(self, recipe: Recipe, sizes: Mapping[str, ModelSizes]) -> Deployment:
        weights, target = weight_bytes(recipe, sizes), sizes[TARGET]
        fraction = recipe.kv_cache.memory_fraction or engine_memory.default_fraction()
        roles = (TARGET,) if recipe.draft is None else (TARGET, DRAFT)
        engines = {
            role: EngineModelSettings(tuple(range(parallelism(recipe, role).world)), fraction)
            for role in roles
        }
        settings = settings_of(recipe, engines[TARGET], engines.get(DRAFT))
        ids, limits = TokenIds(0, 0, (), target.vocab), _limits(recipe)
        models = [config.name for config in engine_models(settings, ids)]
        launch = launch_spec(settings, limits, ids, weights)
        return preview(recipe, models, limits, requirements=requirements(recipe), launch=launch)

    def package_settings(self, recipe: Recipe) -> Mapping[str, Json]:
        """Raises UserError if the version or the GPU is not known, or there is no container for the version."""
        return {
            "runtime": "tensorrt",
            "name": recipe.name,
            "limits": _limits(recipe).model_dump(mode="json"),
            "kv_cache": recipe.kv_cache.model_dump(mode="json"),
            "scheduler": recipe.scheduler.model_dump(mode="json"),
            "guided_decoding": bool(recipe.guided_decoding),
            "serving": {
                "decoupled": recipe.serving.decoupled,
                "prompt_log_probs": recipe.serving.prompt_log_probs,
            },
            "requirements": requirements(recipe).model_dump(mode="json"),
            "gpu_memory_mib": gpu(runtime_settings(recipe).gpu).driver_mib,
            "sources": source_digest(resources.folder("model_repo")),
        }

    def package(self, recipe: Recipe, engines: Engines, into: Path, progress: Progress) -> Mapping[str, Json]:
        """Raises StageError if recipe and engines disagree, or a file is missing."""
        sources = Engines(
            target=engines.target / ENGINE,
            draft=engines.draft / ENGINE if engines.draft is not None else None,
            tokenizer=engines.tokenizer,
        )
        target = EngineFolder.read(sources.target)
        draft = EngineFolder.read(sources.draft) if sources.draft is not None else None
        gpu_bytes = gpu(runtime_settings(recipe).gpu).driver_mib * 2**20
        return package_engines(
            recipe.name,
            engine_settings(recipe, target, draft, gpu_bytes),
            _limits(recipe),
            requirements(recipe),
            target.vocab_size,
            sources,
            into,
            progress,
        )


def requirements(recipe: Recipe) -> Requirements:
    """Requirements of the machine that serves the package.

    Raises:
        UserError: The version or the GPU is not known, or there is no container for the version.
    """
    runtime = runtime_settings(recipe)
    release, image = require_runtime(runtime.version, "tensorrt"), container(runtime.version)
    roles = ("target",) if recipe.draft is None else ("target", "draft")
    return Requirements(
        tensorrt_llm=runtime.version,
        tensorrt=image.tensorrt or release.tensorrt,
        image=image.image,
        driver=image.driver,
        gpu=runtime.gpu,
        sm=gpu(runtime.gpu).sm,
        gpus=max(parallelism(recipe, role).world for role in roles),  # a draft lies on the target's
    )


def _limits(recipe: Recipe) -> DeploymentLimits:
    return DeploymentLimits(
        max_input_tokens=recipe.limits.max_input_tokens,
        max_output_tokens=recipe.limits.max_output_tokens,
        max_concurrency=recipe.limits.max_concurrency,
        max_draft_tokens=recipe.draft.max_draft_tokens if recipe.draft is not None else 0,
    )
