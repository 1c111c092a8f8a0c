"""What is asked of a machine: worked out from a recipe before its build, or read from a package after it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.contracts import gpus, releases
from pipeline.contracts.launching import launching
from pipeline.contracts.rules import rules
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.preflight import sizing
from pipeline.plan.preflight.context import Subject
from pipeline.plan.preflight.finding import Said
from pipeline.recipe.validator import Values

Where = Literal["anywhere", "local", "docker"]
_GIB = 2**30
_KEYS = tuple(
    {key: None for one in rules() if one.group in ("devices", "software", "host") for key in one.fields}
)


@dataclass(frozen=True, slots=True)
class Serving:
    """What TensorRT-LLM needs; a recipe for the CPU has none."""

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
class Needs:
    """All that is asked of one machine."""

    name: str  # of the recipe
    kind: str  # runtime.kind
    build: str = "pipeline build RECIPE"  # the command line that builds it, and to which --set may be added
    deploy: str = "pipeline deploy RECIPE"  # and the one that serves it
    values: Mapping[str, object] = field(
        default_factory=dict
    )  # keys of the recipe -> what they say, where it is known
    serving: Serving | None = None
    where: Where = "anywhere"  # it is to be served; "local" and "docker": now
    spawns: bool = False  # several engines, whose ranks MPI spawns
    build_bytes: int | None = None  # of disk, for all artifacts
    build_memory_bytes: int = 0  # of the host
    calibrated_weights: int = (
        0  # of the largest model that is calibrated; 0: none is, or nothing is known of it
    )
    host_cache_bytes: int = 0  # of the host, for the KV cache


MachineCheck = Callable[[Needs, MachineFacts], Iterator[Said]]


def needs_of(subject: Subject) -> Needs:
    """Those of a recipe."""
    values, rank = Values(subject.recipe.model_dump(mode="json")), sizing.largest_rank_bytes(subject)
    return Needs(
        name=subject.recipe.name,
        kind=subject.kind,
        build=shlex.join(("pipeline", "build", *subject.recipe.words)),
        deploy=shlex.join(("pipeline", "deploy", *subject.recipe.words)),
        values={key: values[key] for key in _KEYS},
        serving=_serving(subject, rank),
        spawns=subject.kind == "tensorrt" and subject.draft is not None,
        build_bytes=sizing.build_bytes(subject),
        build_memory_bytes=sizing.build_memory_bytes(subject),
        calibrated_weights=sizing.calibrated_weights(subject),
        host_cache_bytes=int(subject.recipe.kv_cache.host_memory_gib * _GIB),
    )


def to_build(needs: Needs, *, compiles: bool = True, calibrates: bool = True) -> Needs:
    """What a machine must have that builds a recipe and does not serve it.

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
    )


def to_serve(needs: Needs, where: Where) -> Needs:
    """What a machine must have that serves what is built already."""
    return replace(needs, where=where, build_bytes=None, build_memory_bytes=0, calibrated_weights=0)


def _serving(subject: Subject, rank_bytes: int | None) -> Serving | None:
    runtime, gpu = subject.gpu_runtime, subject.gpu
    if runtime is None or gpu is None or subject.release_problem:
        return None  # other rules say so
    container, facts = releases.container(runtime.version), launching(runtime.version)
    tensorrt = container.tensorrt or releases.release(runtime.version).tensorrt
    return Serving(
        version=runtime.version,
        image=container.image,
        driver=container.driver,
        gpu=gpu,
        gpus=subject.world,
        tensorrt=tensorrt if subject.kind == "tensorrt" else None,
        tensor=max(model.split.tensor for model in subject.models),
        shm_mib=facts.shm_mib(subject.world),
        least_shm_mib=facts.least_shared_memory_mib,
        rank_bytes=rank_bytes,
        programs=((facts.mpirun,) if subject.world > 1 else ()) + (facts.server,),
    )


def numbers(version: str) -> tuple[int, ...]:
    """Of a driver, or of a release, to be compared.

    >>> numbers("590.44.01") < numbers("590.48")
    True
    """
    return tuple(int(part) for part in re.findall(r"\d+", version))
