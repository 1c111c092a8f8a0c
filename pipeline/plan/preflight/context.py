"""What rules look at: a recipe, its models one by one, what is known of them, of the machine, and of what is made."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.contracts import gpus
from pipeline.contracts.releases import container, require
from pipeline.errors import UserError
from pipeline.models.sizes import ModelSizes
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.model_facts import ModelFacts
from pipeline.plan.parallelism import Parallelism, parallelism
from pipeline.plan.plan import DRAFT, TARGET
from pipeline.plan.preflight.generated_config import Emission
from pipeline.recipe import PyTorchRuntime, Recipe, TensorRTRuntime


@dataclass(frozen=True, slots=True)
class Model:
    """The target or the draft of a recipe."""

    role: str  # "target" | "draft"
    source_key: str  # "model.source"
    format_key: str  # "quantization.format"
    tensor_key: str  # "runtime.tensor_parallel"
    format: str
    kv_cache: str  # auto | fp8
    split: Parallelism
    facts: ModelFacts
    is_head: bool  # an Eagle-3 head, which is part of the target's engine

    @property
    def sizes(self) -> ModelSizes | None:
        """None: not known before the checkpoint is here."""
        return self.facts.sizes

    @property
    def architecture(self) -> str | None:
        """The class that its config.json names ("": none). None: not known before the checkpoint is here."""
        return self.sizes.architecture if self.sizes is not None else self.facts.architecture


@dataclass(frozen=True, slots=True)
class Subject:
    """One recipe."""

    recipe: Recipe
    models: tuple[Model, ...]  # the target first
    machine: MachineFacts | None = None
    emitted: Emission | None = None

    @property
    def target(self) -> Model:
        return self.models[0]

    @property
    def draft(self) -> Model | None:
        return self.models[1] if len(self.models) > 1 else None

    @property
    def kind(self) -> str:
        """runtime.kind"""
        return self.recipe.runtime.kind

    @property
    def gpu_runtime(self) -> TensorRTRuntime | PyTorchRuntime | None:
        """The runtime's settings, if it is one of TensorRT-LLM."""
        runtime = self.recipe.runtime
        return runtime if isinstance(runtime, TensorRTRuntime | PyTorchRuntime) else None

    @property
    def gpu(self) -> gpus.Gpu | None:
        """The recipe's GPU; None if it names none, or one that is not known."""
        runtime = self.gpu_runtime
        return next((one for one in gpus.gpus() if runtime is not None and one.name == runtime.gpu), None)

    @property
    def engines(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Role -> flags of trtllm-build that will be said; nothing where that is not known."""
        return self.emitted.engines if self.emitted is not None else ()

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the LLM API that will be written; nothing where that is not known."""
        return self.emitted.arguments if self.emitted is not None else {}

    @property
    def instances(self) -> int:
        """Copies of the target, each on GPUs of its own."""
        runtime = self.recipe.runtime
        return runtime.instances if isinstance(runtime, PyTorchRuntime) else 1

    @property
    def world(self) -> int:
        """GPUs that all of it needs: a draft lies on those of its target."""
        return max(model.split.world for model in self.models) * self.instances

    @property
    def sized(self) -> tuple[tuple[Model, ModelSizes], ...]:
        """The models whose sizes are known."""
        return tuple((model, model.sizes) for model in self.models if model.sizes is not None)

    @property
    def release_problem(self) -> str:
        """Why there is no such release of TensorRT-LLM for this runtime; empty if there is."""
        runtime = self.gpu_runtime
        assert runtime is not None, "asked of TensorRT-LLM only"
        try:
            require(runtime.version, runtime.kind)
            container(runtime.version)
        except UserError as error:
            return str(error)
        return ""

    def without_sizes(self, source_keys: Container[str]) -> Subject:
        """The same, but nothing is known of the sizes of the models at some keys."""
        models = (
            replace(model, facts=replace(model.facts, sizes=None, config_faults=()))
            if model.source_key in source_keys
            else model
            for model in self.models
        )
        return replace(self, models=tuple(models))

    def is_read(self, model: Model) -> bool:
        """Whether its tensors are read here: `pytorch` reads an unquantized checkpoint itself."""
        return self.kind != "pytorch" or model.format != "none"

    def layer_formats(self, model: Model) -> tuple[str, ...]:
        """The formats that layers of a model may have; several only where the format is auto."""
        auto = self.recipe.quantization.auto
        return auto.formats if model.format == "auto" and auto is not None else (model.format,)


def subject(
    recipe: Recipe,
    facts: Mapping[str, ModelFacts],
    machine: MachineFacts | None = None,
    emitted: Emission | None = None,
) -> Subject:
    """The recipe as rules see it; `facts`: role -> what is known of the model."""
    models = [_target(recipe, facts.get(TARGET, ModelFacts()))]
    if recipe.draft is not None:
        models.append(_draft(recipe, facts.get(DRAFT, ModelFacts())))
    return Subject(recipe, tuple(models), machine, emitted)


def _target(recipe: Recipe, facts: ModelFacts) -> Model:
    return Model(
        role=TARGET,
        source_key="model.source",
        format_key="quantization.format",
        tensor_key="runtime.tensor_parallel",
        format=recipe.quantization.format,
        kv_cache=_kv_cache(recipe, recipe.quantization.format),
        split=parallelism(recipe, TARGET),
        facts=facts,
        is_head=False,
    )


def _draft(recipe: Recipe, facts: ModelFacts) -> Model:
    assert recipe.draft is not None, "the caller looked"
    own_ranks = recipe.runtime.kind == "tensorrt"
    return Model(
        role=DRAFT,
        source_key="draft.source",
        format_key="draft.quantization",
        tensor_key="draft.tensor_parallel" if own_ranks else "runtime.tensor_parallel",
        format=recipe.draft.quantization,
        kv_cache=_kv_cache(recipe, recipe.draft.quantization),
        split=parallelism(recipe, DRAFT),
        facts=facts,
        is_head=recipe.draft.method == "eagle3",
    )


def _kv_cache(recipe: Recipe, form: str) -> str:
    """An engine takes the format from its calibrated checkpoint; the LLM API is told."""
    scaled = form != "none" or recipe.runtime.kind == "pytorch"
    return recipe.quantization.kv_cache if scaled else "auto"
