"""The `pytorch` runtime: TensorRT-LLM's LLM API behind Triton's `llmapi` model, from a unified Hugging Face checkpoint.

Nothing is compiled here. `build` puts the arguments beside the checkpoint and judges both; `package` puts them into a
Triton repository. TensorRT-LLM loads, and tunes itself, when the server starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pipeline import resources
from pipeline.contracts import gpus, images, releases
from pipeline.models.adapter import read_adapter
from pipeline.models.sizes import ModelSizes
from pipeline.plan.parallelism import parallelism
from pipeline.plan.plan import TARGET
from pipeline.plan.preflight.needs import weight_bytes
from pipeline.progress import Progress
from pipeline.recipe import PyTorchRuntime as Settings
from pipeline.recipe import Recipe
from pipeline.runtimes.base import EngineBuildRequest, Engines, preview
from pipeline.runtimes.pytorch import artifact
from pipeline.runtimes.pytorch.artifact import draft_tokens, llm_arguments
from pipeline.runtimes.pytorch.model_repository import (
    LlmapiSettings,
    launch_spec,
    llmapi_model,
    package_llmapi,
)
from pipeline.store import Json
from pipeline.triton.config import render
from pipeline.triton.deployment import TARGET_MODEL, Deployment, DeploymentLimits, Requirements
from pipeline.triton.repository import source_digest


class PyTorchBackend:
    """See `pipeline.runtimes.base.Runtime`."""

    packages = ()

    def build_settings(self, recipe: Recipe, role: str) -> Mapping[str, Json]:
        """Raises UserError if the version has no such runtime, or cannot do what the recipe asks for."""
        settings = _runtime(recipe)
        releases.require_runtime(settings.version, "pytorch")
        form, kv_cache = _formats(recipe, role)
        checkpoint: dict[str, Json] = {"format": form, "kv_cache": kv_cache}
        if role != TARGET:
            return {"runtime": settings.kind, "role": role, "checkpoint": checkpoint}
        return {
            "runtime": settings.kind,
            "version": settings.version,
            "arguments": llm_arguments(recipe),
            "checkpoint": checkpoint,
        }

    def build(self, inputs: EngineBuildRequest) -> Mapping[str, Json]:
        version = _runtime(inputs.recipe).version
        size = artifact.write_checkpoint(inputs.checkpoint, inputs.into)
        form, kv_cache = artifact.judge_checkpoint(inputs.into, *_formats(inputs.recipe, inputs.role))
        facts: dict[str, Json] = {
            "runtime": "pytorch",
            "checkpoint": size,
            "quantization": form,
            "kv_cache": kv_cache,
        }
        if inputs.role == TARGET:
            arguments = llm_arguments(inputs.recipe)
            artifact.write_arguments(version, arguments, inputs.into)
            artifact.judge_arguments(version, arguments, inputs.into)
            facts |= {"tensorrt_llm": version, "arguments": arguments}
        artifact.write_facts(facts, inputs.into)
        inputs.progress.say(
            f"    checkpoint of {size['files']} files"
            + (f", arguments for TensorRT-LLM {version}" if inputs.role == TARGET else "")
            + ": read again, complete"
        )
        return facts

    def preview_deployment(self, recipe: Recipe, sizes: Mapping[str, ModelSizes]) -> Deployment:
        launch = launch_spec(serving_settings(recipe), weight_bytes(recipe, sizes))
        needs = _requirements(recipe)
        return preview(recipe, [TARGET_MODEL], _limits(recipe), requirements=needs, launch=launch)

    def package_settings(self, recipe: Recipe) -> Mapping[str, Json]:
        """Raises UserError if the version cannot serve what the recipe asks for."""
        models, settings = resources.folder("model_repo"), serving_settings(recipe)
        return {
            "runtime": "pytorch",
            "name": recipe.name,
            "serving": dict(asdict(settings)),
            "config": render(llmapi_model(settings)),
            "limits": _limits(recipe).model_dump(mode="json"),
            "requirements": _requirements(recipe).model_dump(mode="json"),
            "sources": source_digest(models / "llmapi", models / "shared"),
        }

    def package(self, recipe: Recipe, engines: Engines, into: Path, progress: Progress) -> Mapping[str, Json]:
        arguments = artifact.read_arguments(engines.target)
        adapters = {name: read_adapter(folder) for name, folder in engines.adapters.items()}
        for name, settings in artifact.lora_arguments(recipe, adapters).items():
            arguments[name] = {**settings, **(arguments.get(name) or {})}
        sources = Engines(
            target=engines.target / artifact.CHECKPOINT,
            draft=engines.draft / artifact.CHECKPOINT if engines.draft is not None else None,
            tokenizer=engines.tokenizer,
            adapters=engines.adapters,
        )
        return package_llmapi(
            recipe.name,
            serving_settings(recipe),
            arguments,
            _limits(recipe),
            _requirements(recipe),
            sources,
            into,
            progress,
        )


def serving_settings(recipe: Recipe) -> LlmapiSettings:
    """The one place where the recipe's fields become those of the Triton model."""
    settings = _runtime(recipe)
    queue = recipe.scheduler.max_queue_size
    return LlmapiSettings(
        version=settings.version,
        ranks=parallelism(recipe, TARGET).world,
        instances=settings.instances,
        max_open_requests=recipe.limits.max_concurrency + queue if queue else None,
        guided_decoding=bool(recipe.guided_decoding),
        decoupled=recipe.serving.decoupled,
        prompt_log_probs=recipe.serving.prompt_log_probs,
        adapters=tuple(recipe.adapters),
    )


def _runtime(recipe: Recipe) -> Settings:
    assert isinstance(recipe.runtime, Settings), "chosen by runtime.kind"
    return recipe.runtime


def _formats(recipe: Recipe, role: str) -> tuple[str, str]:
    """Formats of the weights and the KV cache of one checkpoint."""
    if role == TARGET or recipe.draft is None:
        return recipe.quantization.format, recipe.quantization.kv_cache
    return recipe.draft.quantization, recipe.quantization.kv_cache


def _limits(recipe: Recipe) -> DeploymentLimits:
    limits, instances = recipe.limits, _runtime(recipe).instances
    return DeploymentLimits(
        max_input_tokens=limits.max_input_tokens,
        max_output_tokens=limits.max_output_tokens,
        max_concurrency=limits.max_concurrency * instances,
        max_draft_tokens=draft_tokens(recipe),
    )


def _requirements(recipe: Recipe) -> Requirements:
    settings = _runtime(recipe)
    container, gpu = releases.container(settings.version), gpus.gpu(settings.gpu)
    return Requirements(
        tensorrt_llm=settings.version,
        image=images.serving_image(settings.version, "pytorch").name,
        driver=container.driver,
        gpu=gpu.name,
        sm=gpu.sm,
        gpus=parallelism(recipe, TARGET).world * settings.instances,
    )
