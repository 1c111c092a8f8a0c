"""Bytes that the artifacts of a recipe take, before any of them is there: what a build and a server reserve.

Upper bounds: weights by the memory plan, tensor by tensor, with a margin for what files hold besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.contracts.engine_memory import cpu_packs_twice
from pipeline.errors import UserError
from pipeline.models.adapter import Adapter
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import ModelSpec, deployment_spec
from pipeline.plan.memory.tensors import weight_bytes
from pipeline.plan.model_facts import facts_from_sizes
from pipeline.plan.plan import TARGET
from pipeline.plan.preflight.context import make_context
from pipeline.plan.preflight.needs import build_bytes, build_memory_bytes, calibrated_weights
from pipeline.recipe import Recipe

_GIB = 2**30
# Of the weights: headers, alignment, constants of an engine.
_MARGIN = 1.1
# Tokenizers, configurations, calibration samples, reports.
SMALL_FILES = _GIB
# Bytes of a checkpoint in 16 bits for each byte in 4.
_WIDEST = 4
# While one model is exported: itself, Python, torch and CUDA.
_PROCESS = 16 * _GIB
# The memory plan of `cpu` wants to know the machine's memory, which weights do not depend on.
_ANY_MEMORY = 64 * _GIB


@dataclass(frozen=True, slots=True)
class ArtifactSizes:
    """Bytes of the artifacts of one recipe.

    Attributes:
        weights: The weights of one package, all ranks together.
        package: One package, with everything that it holds.
        build: All artifacts that a build leaves: checkpoints as they were fetched, calibrated, split for ranks;
            engines; the package.
        build_memory: Host memory that a build takes.
    """

    weights: int
    package: int
    build: int
    build_memory: int

    @classmethod
    def of_weights(cls, weights: int) -> ArtifactSizes:
        """Bound the sizes by the weights of a package, of whose models nothing is known."""
        package = int(weights * _MARGIN) + SMALL_FILES
        return cls(
            weights=weights,
            package=package,
            build=2 * _WIDEST * weights + package + SMALL_FILES,
            build_memory=_WIDEST * weights + _PROCESS,
        )


def artifact_sizes(
    recipe: Recipe, sizes: Mapping[str, ModelSizes], adapters: Mapping[str, Adapter] | None = None
) -> ArtifactSizes:
    """Work out the sizes of a recipe's artifacts.

    Args:
        sizes: role -> model.
        adapters: LoRA adapters of the recipe that are here, by name; others are not counted.

    Raises:
        UserError: the sizes of a model are not known, or its weights cannot be counted.
    """
    spec = deployment_spec(recipe, sizes, ram_bytes=_ANY_MEMORY)
    facts = facts_from_sizes(sizes)
    context = make_context(recipe, {**facts, TARGET: replace(facts[TARGET], adapters=adapters or {})})
    stored = {model.role: _stored(model) for model in spec.models} if spec is not None else {}
    made = build_bytes(context, stored)
    if not stored or made is None:
        raise UserError(f"{recipe.name}: the sizes of its models are not known here")
    weights = sum(stored.values())
    lora = sum(adapter.file_bytes for adapter in (adapters or {}).values())
    package = int((weights + lora) * _MARGIN) + SMALL_FILES
    # A model is loaded in 16 bits, and its exports are made in memory.
    calibration = 2 * calibrated_weights(context) + max(stored.values()) if calibrated_weights(context) else 0
    return ArtifactSizes(
        weights=weights,
        package=package,
        build=int(made * _MARGIN) + package + SMALL_FILES,
        build_memory=max(build_memory_bytes(context), calibration) + _PROCESS,
    )


def _stored(model: ModelSpec) -> int:
    """Bytes of a model in the recipe's format, on all its ranks."""
    if model.packed is not None:
        # Files of the embedded engine: what is multiplied in bf16 has 16 bits; the projection may be there in 8, too.
        files = replace(model, packed="float16", rounded_head=False, copies_tied=False)
        return weight_bytes(files) + model.sizes.vocab * model.sizes.hidden * cpu_packs_twice(model.format)
    split = model.split
    return split.tensor * sum(weight_bytes(model, stage) for stage in range(split.pipeline))
