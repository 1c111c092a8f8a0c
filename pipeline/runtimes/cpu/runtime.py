"""The `cpu` runtime: OpenVINO models with the calibrated weights, run by our paged engine behind real Triton."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from pipeline import resources
from pipeline.errors import StageError
from pipeline.models.sizes import ModelSizes
from pipeline.models.token_ids import TokenIds, token_ids
from pipeline.plan.plan import TARGET
from pipeline.progress import Progress
from pipeline.recipe import CpuRuntime as Settings
from pipeline.recipe import Recipe
from pipeline.runtimes.base import EngineBuildRequest, Engines, preview
from pipeline.runtimes.cpu.model_repository import (
    ENGINE,
    CpuSettings,
    cpu_models,
    deployment_limits,
    package_cpu,
)
from pipeline.store import Json
from pipeline.triton.deployment import Deployment
from pipeline.triton.repository import source_digest


class CpuBackend:
    """See `pipeline.runtimes.base.Runtime`."""

    packages = ("openvino",)

    def build_settings(self, recipe: Recipe, role: str) -> Mapping[str, Json]:
        settings = _runtime(recipe)
        adapted: Mapping[str, Json] = {"adapters": True} if recipe.adapters and role == TARGET else {}
        return {
            "runtime": settings.kind,
            "files": 3,  # raised when the same recipe gives other files
            "simulate_activations": settings.simulate_activations,
            **adapted,
        }

    def build(self, inputs: EngineBuildRequest) -> Mapping[str, Json]:
        from pipeline.runtimes.cpu.ir import build_ir

        settings = _runtime(inputs.recipe)
        return build_ir(
            inputs.checkpoint,
            inputs.into,
            simulate_activations=settings.simulate_activations,
            adapters=bool(inputs.recipe.adapters) and inputs.role == TARGET,
            progress=inputs.progress,
        )

    def preview_deployment(self, recipe: Recipe, sizes: Mapping[str, ModelSizes]) -> Deployment:  # noqa: ARG002
        settings = serving_settings(recipe)
        models = [config.name for config in cpu_models(settings, TokenIds(0, 0, (), 0))]
        return preview(recipe, models, deployment_limits(settings))

    def package_settings(self, recipe: Recipe) -> Mapping[str, Json]:
        return {
            "runtime": "cpu",
            "name": recipe.name,
            "serving": asdict(serving_settings(recipe)),
            "sources": source_digest(resources.folder("model_repo"), ENGINE),
        }

    def package(self, recipe: Recipe, engines: Engines, into: Path, progress: Progress) -> Mapping[str, Json]:
        settings = serving_settings(recipe)
        if settings.guided_decoding and (fault := _unguidable(engines)):
            if recipe.guided_decoding:
                raise StageError(f"recipe {recipe.name}: guided_decoding is true, but {fault}")
            progress.say(f"No guided decoding: {fault}")
            settings = replace(settings, guided_decoding=False)
        return package_cpu(recipe.name, settings, engines, into, progress)


def _runtime(recipe: Recipe) -> Settings:
    assert isinstance(recipe.runtime, Settings), "chosen by runtime.kind"
    return recipe.runtime


def _unguidable(engines: Engines) -> str | None:
    """Why the engine could hold no answer to a form: its library does not know every kind of tokenizer."""
    from pipeline.runtimes.cpu.engine.grammars import Grammars, Vocabulary

    facts = json.loads((engines.target / "engine.json").read_text(encoding="utf-8"))
    ids = token_ids(engines.tokenizer, facts["vocab_size"])
    try:
        Grammars(Vocabulary(engines.tokenizer / "tokenizer.json", ids.end), ids.vocab_size)
    except ValueError as error:
        return f"llguidance cannot use this tokenizer: {' '.join(str(error).split())}"
    return None


def serving_settings(recipe: Recipe) -> CpuSettings:
    """The one place where the recipe's fields become those of the Triton models."""
    runtime, limits = _runtime(recipe), recipe.limits
    return CpuSettings(
        max_input_tokens=limits.max_input_tokens,
        max_output_tokens=limits.max_output_tokens,
        max_concurrency=limits.max_concurrency,
        max_batch_tokens=limits.max_batch_tokens,
        max_draft_tokens=recipe.draft.max_draft_tokens if recipe.draft else 0,
        speculation=runtime.speculation,
        kv_cache_mib=runtime.kv_cache_mib,
        kv_cache_reuse=recipe.kv_cache.reuse,
        threads=runtime.threads,
        precision=runtime.precision,
        guided_decoding=recipe.guided_decoding is not False,
        max_queue_size=recipe.scheduler.max_queue_size,
        max_queue_delay_us=recipe.scheduler.max_queue_delay_us,
        decoupled=recipe.serving.decoupled,
        adapters=tuple(recipe.adapters),
    )
