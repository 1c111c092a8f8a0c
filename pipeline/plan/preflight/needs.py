"""Requirements on a machine: computed from a recipe before its build, or read from a package after it.

Disk and host memory are lower bounds, for the rules of a machine; how GPU memory is used is the matter of
`pipeline.plan.memory`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.contracts import gpus, releases
from pipeline.contracts.images import serving_image
from pipeline.contracts.launching import launch_facts
from pipeline.contracts.rules import rule, rules
from pipeline.errors import UserError
from pipeline.models.sizes import ModelSizes
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.memory.capacity import host_cache_bytes
from pipeline.plan.memory.recipe_spec import adapter_demand
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.memory.tensors import parameter_counts, published_bytes_by_format
from pipeline.plan.model_facts import facts_from_sizes
from pipeline.plan.plan import rank_exports
from pipeline.plan.preflight.context import Context, Objection, RecipeModel, make_context
from pipeline.recipe import CpuRuntime, Recipe
from pipeline.recipe.sections import RecipeValues

Where = Literal["anywhere", "local", "docker"]
_GIB = 2**30
_KEYS = tuple(
    {key: None for each in rules() if each.group in ("devices", "software", "host") for key in each.fields}
)


@dataclass(frozen=True, slots=True)
class ServingNeeds:
    """Requirements of serving with TensorRT-LLM; a recipe for the CPU has none."""

    version: str  # of TensorRT-LLM
    image: str  # container that serves
    driver: str  # oldest that it runs with
    gpu: gpus.Gpu
    gpus: int  # ranks of all instances, each on a GPU of its own
    tensorrt: str | None = None  # that engines are built with; None: there are none, or it is not known
    tensor: int = 1  # GPUs that share each layer; 1 where that is not known
    shm_mib: int = 0  # that the launch wants
    least_shm_mib: int = 0  # below which nothing that spans GPUs starts
    rank_bytes: int | None = None  # weights of the largest rank; None: not known
    programs: tuple[str, ...] = ()  # that the launch runs


@dataclass(frozen=True, slots=True)
class MachineNeeds:
    """All that one machine must have."""

    name: str  # of the recipe
    kind: str  # runtime.kind
    build: str = "pipeline build RECIPE"  # the command line that builds it, and to which --set may be added
    serve: str = "pipeline serve RECIPE"  # and the command that serves it
    values: Mapping[str, object] = field(
        default_factory=dict
    )  # keys of the recipe -> what they say, where it is known
    serving: ServingNeeds | None = None
    where: Where = "anywhere"  # it is to be served; "local" and "docker": now
    spawns: bool = False  # several engines, whose ranks MPI spawns
    build_bytes: int | None = None  # of disk, for all artifacts
    build_memory_bytes: int = 0  # of the host
    calibrated_weights: int = (
        0  # of the largest model that is calibrated; 0: none is, or nothing is known of it
    )
    host_cache_bytes: int = 0  # of the host, for the KV cache and for adapters
    bf16: bool = False  # arithmetic of the processor


MachineCheck = Callable[[MachineNeeds, MachineFacts], Iterator[Objection]]


def needs_of(context: Context) -> MachineNeeds:
    """Work out what a recipe requires of the machine that builds and serves it."""
    values, rank = RecipeValues(context.recipe.model_dump(mode="json")), largest_rank_bytes(context)
    runtime = context.recipe.runtime
    return MachineNeeds(
        name=context.recipe.name,
        kind=context.kind,
        build=shlex.join(("pipeline", "build", *context.recipe.build_argv)),
        serve=shlex.join(("pipeline", "serve", *context.recipe.argv)),
        values={key: values[key] for key in _KEYS},
        serving=_serving(context, rank),
        spawns=context.kind == "tensorrt" and context.draft is not None,
        build_bytes=build_bytes(context),
        build_memory_bytes=build_memory_bytes(context),
        calibrated_weights=calibrated_weights(context),
        host_cache_bytes=int(context.recipe.kv_cache.host_memory_gib * _GIB) + _adapter_bytes(context),
        bf16=isinstance(runtime, CpuRuntime) and runtime.precision == "bf16",
    )


def needs_to_build(needs: MachineNeeds, *, compiles: bool = True, calibrates: bool = True) -> MachineNeeds:
    """Reduce needs to those of a machine that builds a recipe and does not serve it.

    Ranks of an engine may be compiled one after the other, on one GPU of the kind that serves them.

    Args:
        compiles: whether it makes the engines; for `pytorch` and `cpu` there are none.
        calibrates: whether it measures the scales.
    """
    serving = needs.serving if compiles and needs.kind == "tensorrt" else None
    if serving is not None:
        serving = replace(serving, gpus=1, tensor=1, shm_mib=0, programs=())
    return replace(
        needs,
        serving=serving,
        spawns=False,
        build_memory_bytes=needs.build_memory_bytes if compiles else 0,
        calibrated_weights=needs.calibrated_weights if calibrates else 0,
        host_cache_bytes=0,
        bf16=False,
    )


def needs_to_serve(needs: MachineNeeds, where: Where) -> MachineNeeds:
    """Reduce needs to those of a machine that serves what is built already."""
    return replace(needs, where=where, build_bytes=None, build_memory_bytes=0, calibrated_weights=0)


def _adapter_bytes(context: Context) -> int:
    """Bytes of the host's memory for LoRA adapters, as far as these and their base are known."""
    target, demand = context.target, adapter_demand(context.recipe, context.target.facts.adapters)
    if demand is None or target.sizes is None or (context.gpu_runtime and context.release_problem):
        return 0
    return host_cache_bytes(demand, ModelSpec(target.role, target.sizes, target.split))


def _serving(context: Context, rank_bytes: int | None) -> ServingNeeds | None:
    runtime, gpu = context.gpu_runtime, context.gpu
    if runtime is None or gpu is None or context.release_problem:
        return None  # other rules say so
    container, facts = releases.container(runtime.version), launch_facts(runtime.version)
    tensorrt = container.tensorrt or releases.release(runtime.version).tensorrt
    return ServingNeeds(
        version=runtime.version,
        image=serving_image(runtime.version, runtime.kind).name,
        driver=container.driver,
        gpu=gpu,
        gpus=context.world,
        tensorrt=tensorrt if context.kind == "tensorrt" else None,
        tensor=max(model.split.tensor for model in context.models),
        shm_mib=facts.shm_mib(context.world),
        least_shm_mib=facts.least_shared_memory_mib,
        rank_bytes=rank_bytes,
        programs=((facts.mpirun,) if context.world > 1 else ()) + (facts.server,),
    )


def version_numbers(version: str) -> tuple[int, ...]:
    """Split the version of a driver or a release into numbers that can be compared.

    >>> version_numbers("590.44.01") < version_numbers("590.48")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version))


_AS_PUBLISHED = "none"


def published_bytes(model: RecipeModel) -> int | None:
    """Bytes of the checkpoint as it is fetched; None if nothing is known of the model."""
    return model.facts.weight_bytes or _bytes(model, _AS_PUBLISHED)


def stored_bytes(model: RecipeModel) -> int | None:
    """Bytes of the checkpoint, or the engine, in the recipe's format."""
    return _bytes(model, model.format)


def weight_bytes(recipe: Recipe, sizes: Mapping[str, ModelSizes]) -> int:
    """Sum the bytes of all models of a recipe, in the recipe's formats.

    Raises:
        UserError: the sizes of a model are not known.
    """
    total = 0
    for model in make_context(recipe, facts_from_sizes(sizes)).models:
        stored = stored_bytes(model)
        if stored is None:
            raise UserError(
                f"{recipe.name}: how it is served depends on the size of its {model.role}, which is not known here; "
                "ask where the Hub can be reached, or fetch the checkpoint first (build --until fetch.target)"
            )
        total += stored
    return total


def build_bytes(context: Context, planned: Mapping[str, int] | None = None) -> int | None:
    """Sum the bytes of disk of all artifacts of a build; None if nothing is known of one of the models.

    Adapters count as far as they are here: as they are fetched, and in the package.

    Args:
        planned: Role -> bytes of the model in the recipe's format, where the memory plan has counted them by tensor.
    """
    copies: Mapping[str, int] = rule("host.disk").facts["copies"][context.kind]
    total = 2 * sum(adapter.file_bytes for adapter in context.target.facts.adapters.values())
    for model in context.models:
        fetched, stored = published_bytes(model), (planned or {}).get(model.role) or stored_bytes(model)
        if fetched is None or stored is None:
            return None
        count = copies["plain" if model.format == "none" else "calibrated"]
        # A calibrated model is exported once for each number of ranks.
        again = len(rank_exports(context.recipe, model.role)) - 1 if model.format != "none" else 0
        total += fetched + stored * (count + max(0, again))
    return total


def build_memory_bytes(context: Context) -> int:
    """Bytes of host memory while an engine is built; 0 if nothing is known of the models, or no engine is built."""
    facts, rank = rule("host.memory").facts, largest_rank_bytes(context)
    if rank is None or context.kind == "pytorch":
        return 0
    if context.kind == "cpu":  # its constants are copies: joined, padded or packed otherwise
        return rank
    return int(rank * facts["copies"] + facts["worker_gib"] * 2**30)


def calibrated_weights(context: Context) -> int:
    """Count the weights of the largest model that is calibrated, which is loaded whole; 0 if there is none, or it is
    not known.
    """
    calibrated = (sizes for model, sizes in context.sized if model.format != "none" and not model.is_cast)
    return max((sum(parameter_counts(sizes).values()) for sizes in calibrated), default=0)


def largest_rank_bytes(context: Context) -> int | None:
    """Bytes of the largest rank's weights, in the recipe's format; None if nothing is known of any model."""
    ranks = [
        -(-size // model.split.world) for model in context.models if (size := stored_bytes(model)) is not None
    ]
    return max(ranks, default=None)


def _bytes(model: RecipeModel, form: str) -> int | None:
    sizes = model.sizes
    if sizes is None:
        return None
    if form == _AS_PUBLISHED:
        return sum(published_bytes_by_format((*sizes.weights(), *sizes.draft), sizes.dtype).values())
    each: float = rule("host.disk").facts["bytes_per_weight"][form]
    return int(sum(parameter_counts(sizes).values()) * each)
