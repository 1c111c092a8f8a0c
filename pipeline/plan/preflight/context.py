"""The facts that rules look at (a recipe, its models, the machine, what will be written), and the objections of checks.

What will be written (`GeneratedConfig`: flags of trtllm-build, arguments of the LLM API, settings of a package) is what
the keys of the artifacts are made from, so a rule about upstream's files judges the very values that go into them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pipeline.contracts import gpus, trtllm_build
from pipeline.contracts.releases import container, require_runtime
from pipeline.contracts.rules import Severity
from pipeline.errors import Fault, UserError
from pipeline.models.sizes import ModelSizes
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.memory import MemoryPlan, StepLimits, deployment_spec, plan_memory
from pipeline.plan.model_facts import ModelFacts
from pipeline.plan.parallelism import Parallelism, parallelism
from pipeline.plan.plan import DRAFT, TARGET
from pipeline.recipe import PyTorchRuntime, Recipe, TensorRTRuntime
from pipeline.store import Json


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """The calibration set, as far as rules judge it."""

    problem: str = ""  # why it cannot be read
    conversations: bool = False  # whether its rows are messages, which a chat template makes text of


@dataclass(frozen=True, slots=True)
class GeneratedConfig:
    """Settings of engines and package, as the runtime works them out."""

    # role -> of its engine; without those that were refused
    build: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    package: Mapping[str, Json] = field(default_factory=dict)
    refusals: tuple[Fault, ...] = ()  # what kept the runtime from working them out
    dataset: DatasetFacts | None = None  # None: nothing is calibrated

    @property
    def engines(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Role -> values of all flags of trtllm-build, defaults included: "enable", 8, None for what is not said."""
        return tuple(
            (role, trtllm_build.parse(str(settings["version"]), _words(settings["flags"])))
            for role, settings in self.build.items()
            if "flags" in settings
        )

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the LLM API; empty for other runtimes."""
        arguments = self.build.get(TARGET, {}).get("arguments", {})
        assert isinstance(arguments, Mapping), "as the pytorch runtime writes them"
        return arguments

    @property
    def steps(self) -> dict[str, StepLimits]:
        """Role -> what the runtime asks of its engine, as far as memory depends on it."""
        steps = {
            role: StepLimits(flags["max_num_tokens"], flags["tokens_per_block"] or StepLimits().block_tokens)
            for role, flags in self.engines
        }
        if self.arguments:
            block = self.arguments["kv_cache_config"].get("tokens_per_block") or StepLimits().block_tokens
            both = StepLimits(int(self.arguments["max_num_tokens"]), int(block))
            steps |= {TARGET: both, DRAFT: both}
        return steps

    def of_package(self, section: str) -> Mapping[str, Any]:
        """A section of the package's settings, such as "limits" or "requirements"; empty if it has none."""
        settings = self.package.get(section, {})
        assert isinstance(settings, Mapping), "sections are mappings"
        return settings


def _words(flags: Json) -> list[str]:
    assert isinstance(flags, list), "a command line"
    return [str(word) for word in flags]


@dataclass(frozen=True, slots=True)
class RecipeModel:
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
        """Its sizes; None if they are not known before the checkpoint is here."""
        return self.facts.sizes

    @property
    def is_cast(self) -> bool:
        """Whether its weights are published in MXFP4 and cast to NVFP4, with no calibration of weights."""
        return self.sizes is not None and self.sizes.stored == "mxfp4" and self.format != "none"

    @property
    def architecture(self) -> str | None:
        """The class that its config.json names ("": none). None: not known before the checkpoint is here."""
        return self.sizes.architecture if self.sizes is not None else self.facts.architecture


@dataclass(frozen=True)
class Context:
    """One recipe with all that rules look at."""

    recipe: Recipe
    models: tuple[RecipeModel, ...]  # the target first
    machine: MachineFacts | None = None
    emitted: GeneratedConfig = GeneratedConfig()

    @property
    def target(self) -> RecipeModel:
        """The model that answers."""
        return self.models[0]

    @property
    def draft(self) -> RecipeModel | None:
        """The model that proposes tokens, if there is one."""
        return self.models[1] if len(self.models) > 1 else None

    @property
    def kind(self) -> str:
        """`runtime.kind` of the recipe."""
        return self.recipe.runtime.kind

    @property
    def gpu_runtime(self) -> TensorRTRuntime | PyTorchRuntime | None:
        """The runtime's settings, if it is one of TensorRT-LLM."""
        runtime = self.recipe.runtime
        return runtime if isinstance(runtime, TensorRTRuntime | PyTorchRuntime) else None

    @cached_property
    def gpu(self) -> gpus.Gpu | None:
        """The recipe's GPU; None if it names none, or a GPU that is not known."""
        runtime = self.gpu_runtime
        return next(
            (product for product in gpus.gpus() if runtime is not None and product.name == runtime.gpu), None
        )

    @property
    def engines(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Role -> flags of trtllm-build that will be said; nothing where that is not known."""
        return self.emitted.engines

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the LLM API that will be written; nothing where that is not known."""
        return self.emitted.arguments

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
    def sized(self) -> tuple[tuple[RecipeModel, ModelSizes], ...]:
        """The models whose sizes are known."""
        return tuple((model, model.sizes) for model in self.models if model.sizes is not None)

    @cached_property
    def release_problem(self) -> str:
        """Why there is no such release of TensorRT-LLM for this runtime; empty if there is."""
        runtime = self.gpu_runtime
        assert runtime is not None, "asked of TensorRT-LLM only"
        try:
            require_runtime(runtime.version, runtime.kind)
            container(runtime.version)
        except UserError as error:
            return str(error)
        return ""

    @property
    def version(self) -> str | None:
        """Release of TensorRT-LLM; None if the runtime is another, or there is no such release."""
        runtime = self.gpu_runtime
        return None if runtime is None or self.release_problem else runtime.version

    @cached_property
    def memory(self) -> MemoryPlan | None:
        """Memory of all ranks; None: sizes, GPU or types are not known, which other rules say where it matters."""
        sizes = {model.role: model.sizes for model in self.models if model.sizes is not None}
        adapters = self.target.facts.adapters
        try:
            demand = deployment_spec(self.recipe, sizes, self.emitted.steps, adapters=adapters)
        except UserError:
            return None
        return plan_memory(demand) if demand is not None else None

    def without_sizes(self, source_keys: Container[str]) -> Context:
        """Return a copy in which the sizes of the models at some keys are not known."""
        models = (
            replace(model, facts=replace(model.facts, sizes=None, config_faults=()))
            if model.source_key in source_keys
            else model
            for model in self.models
        )
        return replace(self, models=tuple(models))

    def is_read(self, model: RecipeModel) -> bool:
        """Tell whether a model's tensors are read here: `pytorch` reads an unquantized checkpoint itself."""
        return self.kind != "pytorch" or model.format != "none"

    def layer_formats(self, model: RecipeModel) -> tuple[str, ...]:
        """List the formats that layers of a model may have; several only where the format is auto."""
        auto = self.recipe.quantization.auto
        return auto.formats if model.format == "auto" and auto is not None else (model.format,)


def make_context(
    recipe: Recipe,
    facts: Mapping[str, ModelFacts],
    machine: MachineFacts | None = None,
    emitted: GeneratedConfig | None = None,
) -> Context:
    """Put together what rules look at. `facts` is by role; None leaves the rules of a machine, or of settings, out."""
    models = [_target(recipe, facts.get(TARGET, ModelFacts()))]
    if recipe.draft is not None:
        models.append(_draft(recipe, facts.get(DRAFT, ModelFacts())))
    return Context(recipe, tuple(models), machine, emitted or GeneratedConfig())


def _target(recipe: Recipe, facts: ModelFacts) -> RecipeModel:
    return RecipeModel(
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


def _draft(recipe: Recipe, facts: ModelFacts) -> RecipeModel:
    assert recipe.draft is not None, "the caller looked"
    own_ranks = recipe.runtime.kind == "tensorrt"
    return RecipeModel(
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


@dataclass(frozen=True, slots=True)
class Objection:
    """One objection of a check. Severity and sources are the rule's, unless given."""

    keys: tuple[str, ...]  # of the recipe, the one to change first
    problem: str
    fix: str = ""
    severity: Severity | None = None
    sources: tuple[str, ...] = ()


Check = Callable[[Context], Iterator[Objection]]
