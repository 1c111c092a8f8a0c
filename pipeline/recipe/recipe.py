"""A recipe: everything that makes one deployment, from the checkpoint to the latencies it is to meet.

Two recipes are equal when they say the same; where they were read from (`provenance`) takes no part.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from pipeline.recipe.draft import Draft
from pipeline.recipe.limits import Limits
from pipeline.recipe.provenance import Provenance
from pipeline.recipe.quantization import Quantization
from pipeline.recipe.response_cache import CacheSettings
from pipeline.recipe.runtime import CpuRuntime, Runtime
from pipeline.recipe.section import Section, refusal
from pipeline.recipe.serving import KvCache, Scheduler, Slo, TransactionPolicy
from pipeline.recipe.source import Checkpoint
from pipeline.recipe.validator import Values
from pipeline.recipe.validators import broken_rules

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise refusal(
            "is not a name", 'write at most 63 lower-case letters, digits, "-" and ".", like llama-3.1-8b-fp8'
        )
    return text


class Recipe(Section):
    """One recipe per model becomes a running Triton deployment that streams tokens."""

    name: Annotated[
        str, AfterValidator(_name), Field(json_schema_extra={"pattern": f"^{_NAME.pattern}$"})
    ] = Field(description="Name of the deployment.", examples=["llama-3.1-8b-fp8"])
    model: Checkpoint = Field(description="The target: the model that answers.")
    draft: Draft | None = Field(default=None, description="The draft: a small model that proposes tokens.")
    quantization: Quantization = Field(
        default_factory=Quantization,
        description="How weights and KV cache are stored, and what that may cost.",
    )
    runtime: Runtime = Field(default_factory=CpuRuntime, description="What executes the model.")
    limits: Limits = Field(description="Lengths and concurrency.")
    guided_decoding: bool | None = Field(
        default=None,
        description="Hold answers to a JSON schema, expression or grammar if requests ask; by default on cpu only.",
    )
    kv_cache: KvCache = Field(default_factory=KvCache, description="The KV cache of the engine.")
    scheduler: Scheduler = Field(default_factory=Scheduler, description="How requests share the engine.")
    serving: TransactionPolicy = Field(
        default_factory=TransactionPolicy, description="How requests are answered."
    )
    slo: Slo = Field(default_factory=Slo, description="Latencies to meet.")
    cache: CacheSettings = Field(default_factory=CacheSettings, description="The response cache.")

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    @property
    def provenance(self) -> Provenance:
        """The file and the overrides that it was read from."""
        return self._provenance

    @property
    def words(self) -> tuple[str, ...]:
        """What names it on a command line; `RECIPE`, as in a command's help, where it was read from no file."""
        return self._provenance.words or ("RECIPE",)

    def read_from(self, provenance: Provenance) -> Self:
        """The same recipe, with where it came from."""
        copy = self.model_copy()
        copy._provenance = provenance
        return copy

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        values = Values(self.model_dump(mode="json"))
        errors: list[InitErrorDetails] = []
        for problem in broken_rules(values):
            subject: tuple[int | str, ...] = tuple(problem.keys[0].split("."))
            value: Any = values[problem.keys[0]]
            errors.append(InitErrorDetails(type=problem.as_error(), loc=subject, input=value))
        if errors:
            raise ValidationError.from_exception_data("Recipe", errors)
        return self
