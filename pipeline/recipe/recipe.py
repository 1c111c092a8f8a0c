"""A recipe: everything that makes one deployment, from the checkpoint to the latencies it is to meet.

Two recipes are equal when they say the same; where they were read from (`provenance`) takes no part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from pipeline.recipe.deployment import DeploySection, GatewaySection, KubernetesSection, TritonSection
from pipeline.recipe.library import packaged
from pipeline.recipe.quantization import DraftFormat, Quantization
from pipeline.recipe.response_cache import CacheSettings
from pipeline.recipe.runtime import CpuRuntime, Runtime
from pipeline.recipe.sections import (
    GoldenQuestions,
    KvCache,
    Limits,
    RecipeSection,
    RecipeValues,
    Scheduler,
    ServingPolicy,
    Slo,
    matching,
)
from pipeline.recipe.source import Checkpoint, Revision, Source
from pipeline.recipe.validators import broken_rules

# Sections that nothing which is built depends on.
SERVED_SECTIONS = frozenset({"cache", "gateway", "triton", "deploy", "kubernetes"})
MAX_ADAPTERS = 256
Name = Annotated[
    str,
    *matching(
        "[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?",
        'write at most 63 lower-case letters, digits, "-" and ".", like llama-3.1-8b-fp8',
        "is not a name",
    ),
]
AdapterName = Annotated[
    str,
    matching(
        "[A-Za-z0-9][A-Za-z0-9_-]{0,62}",
        'write at most 63 letters, digits, "_" and "-", like support-tone',
        "is not a name of an adapter",
    )[0],
]


class Draft(Checkpoint):
    """A draft: an ordinary model with the target's tokenizer, or an Eagle-3 head of the target."""

    method: Literal["draft_target", "eagle3"] = Field(
        default="draft_target", description="An independent model, or an Eagle-3 head (pytorch only)."
    )
    max_draft_tokens: int = Field(ge=1, le=64, description="Tokens proposed in one round.")
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="GPUs that share each layer of the draft (tensorrt only)."
    )
    quantization: DraftFormat = Field(
        default="none", description="Format of the draft's weights; calibrated like the target."
    )


class AdapterSource(RecipeSection):
    """A LoRA adapter as peft saves it: adapter_config.json and adapter_model.safetensors."""

    source: Source = Field(
        description="Where the adapter comes from.",
        examples=["hf:my-org/my-adapter", "local:adapters/my-adapter"],
    )
    revision: Revision | None = Field(
        default=None,
        description="Branch, tag or commit on the Hub; without it, the default branch as it is when fetched.",
    )


@dataclass(frozen=True, slots=True)
class RecipeProvenance:
    """The file (None for a recipe made in Python), and the overrides of the command line.

    >>> str(RecipeProvenance(Path("r.yaml"), ("limits.max_concurrency=4",)))
    'r.yaml with --set limits.max_concurrency=4'
    """

    file: Path | None = field(default=None, compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)

    @property
    def argv(self) -> tuple[str, ...]:
        """Arguments that name the recipe on a command line, in any folder: its packaged name or its path, and --set."""
        if self.file is None:
            return ()
        name = self.file.stem if packaged().get(self.file.stem) == self.file else str(self.file)
        return (name, *(word for override in self.overrides for word in ("--set", override)))

    @property
    def build_argv(self) -> tuple[str, ...]:
        """Arguments of `argv`, without overrides of sections that no built artifact depends on."""
        overrides = tuple(
            override
            for override in self.overrides
            if re.split("[.=]", override, maxsplit=1)[0] not in SERVED_SECTIONS
        )
        return replace(self, overrides=overrides).argv

    def __str__(self) -> str:
        return " ".join(
            [str(self.file), *(["with"] if self.overrides else []), *(f"--set {o}" for o in self.overrides)]
        )


class Recipe(RecipeSection):
    """One recipe per model becomes a running Triton deployment that streams tokens."""

    name: Name = Field(description="Name of the deployment.", examples=["llama-3.1-8b-fp8"])
    model: Checkpoint = Field(description="The target: the model that answers.")
    draft: Draft | None = Field(default=None, description="The draft: a small model that proposes tokens.")
    adapters: dict[AdapterName, AdapterSource] = Field(
        default_factory=dict,
        max_length=MAX_ADAPTERS,
        description="LoRA adapters of the target by name, which requests choose: model NAME-OF-RECIPE:ADAPTER at the "
        "gateway, lora_name at Triton (pytorch and cpu).",
        examples=[{"support-tone": {"source": "hf:my-org/support-tone"}}],
    )
    quantization: Quantization = Field(
        default_factory=Quantization,
        description="How weights and KV cache are stored, and what that may cost.",
    )
    runtime: Runtime = Field(default_factory=CpuRuntime, description="Runtime that executes the model.")
    limits: Limits = Field(description="Lengths and concurrency.")
    guided_decoding: bool | None = Field(
        default=None,
        description="Hold answers to a JSON schema, expression or grammar if requests ask; by default on cpu only.",
    )
    kv_cache: KvCache = Field(default_factory=KvCache, description="The KV cache of the engine.")
    scheduler: Scheduler = Field(default_factory=Scheduler, description="How requests share the engine.")
    serving: ServingPolicy = Field(default_factory=ServingPolicy, description="How requests are answered.")
    slo: Slo = Field(default_factory=Slo, description="Latencies to meet.")
    tool_prompt: Literal["auto", "template"] = Field(
        default="auto",
        description="Where the chat template takes no tools: describe them in a section of the prompt (auto), or "
        "refuse requests that bring some (template).",
    )
    golden: GoldenQuestions | None = Field(
        default=None, description="Questions that a package must answer before it takes traffic."
    )
    cache: CacheSettings = Field(default_factory=CacheSettings, description="The response cache.")
    gateway: GatewaySection = Field(
        default_factory=GatewaySection, description="The OpenAI API in front of Triton."
    )
    triton: TritonSection = Field(
        default_factory=TritonSection, description="How Triton is started and watched."
    )
    deploy: DeploySection = Field(
        default_factory=DeploySection, description="Files that `pipeline deploy` writes, whatever the target."
    )
    kubernetes: KubernetesSection = Field(
        default_factory=KubernetesSection, description="Files that `pipeline deploy` writes for Kubernetes."
    )

    _provenance: RecipeProvenance = PrivateAttr(default_factory=RecipeProvenance)

    @property
    def provenance(self) -> RecipeProvenance:
        """The file and the overrides that it was read from."""
        return self._provenance

    @property
    def argv(self) -> tuple[str, ...]:
        """Arguments that name it on a command line; `RECIPE`, as in help texts, for a recipe from no file."""
        return self._provenance.argv or ("RECIPE",)

    @property
    def build_argv(self) -> tuple[str, ...]:
        """Arguments that name it for `pipeline build`: `argv`, without overrides that only serving reads."""
        return self._provenance.build_argv or ("RECIPE",)

    @property
    def checkpoints(self) -> dict[str, Checkpoint]:
        """The checkpoint of the "target", and of the "draft" if there is one."""
        checkpoints: dict[str, Checkpoint] = {"target": self.model}
        return checkpoints if self.draft is None else checkpoints | {"draft": self.draft}

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests to the gateway may have: its own, its aliases, and each of them with each adapter."""
        names = (self.name, *self.serving.aliases)
        return (*names, *(f"{name}:{adapter}" for adapter in self.adapters for name in names))

    @property
    def sources(self) -> dict[str, Checkpoint | AdapterSource]:
        """All that is fetched, by role: the checkpoints, and "adapter.NAME" for each adapter."""
        return {**self.checkpoints, **{f"adapter.{name}": adapter for name, adapter in self.adapters.items()}}

    def __hash__(self) -> int:
        # Of adapters the names alone: a mapping has no hash.
        return hash((*(value for name, value in self if name != "adapters"), *self.adapters))

    def built_values(self) -> dict[str, Any]:
        """Values of the sections that a build reads: all but `SERVED_SECTIONS`."""
        return self.model_dump(mode="json", exclude=set(SERVED_SECTIONS))

    def read_from(self, provenance: RecipeProvenance) -> Self:
        """Return a copy of the recipe that knows where it came from."""
        copy = self.model_copy()
        copy._provenance = provenance
        return copy

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        values = RecipeValues(self.model_dump(mode="json"))
        errors: list[InitErrorDetails] = []
        for problem in broken_rules(values):
            subject: tuple[int | str, ...] = tuple(problem.keys[0].split("."))
            value: Any = values[problem.keys[0]]
            errors.append(InitErrorDetails(type=problem.as_error(), loc=subject, input=value))
        if errors:
            raise ValidationError.from_exception_data("Recipe", errors)
        return self
