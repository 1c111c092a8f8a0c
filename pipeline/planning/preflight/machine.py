"""Rules about the machine that builds, or that serves. What is not known of it is not judged.

Each function is one rule of contracts/data/rules, under its id in CHECKS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations

from pipeline.contracts import gpus, releases
from pipeline.contracts.launching import launching
from pipeline.contracts.rules import rule
from pipeline.planning.machine_facts import GpuFacts, MachineFacts
from pipeline.planning.preflight import sizing
from pipeline.planning.preflight.finding import Check, Said
from pipeline.planning.preflight.subject import Subject

TENSOR, GPU, VERSION = "runtime.tensor_parallel", "runtime.gpu", "runtime.version"
_MIB, _GIB = 2**20, 2**30
PORTS = (8000, 8001, 8002)
_NOWHERE = MachineFacts()


def _here(subject: Subject) -> MachineFacts:
    return subject.machine or _NOWHERE


def _used(subject: Subject) -> tuple[GpuFacts, ...]:
    """The GPUs that would be used: the first ones, as CUDA and Docker take them."""
    return (_here(subject).gpus or ())[: subject.world]


def _wanted(subject: Subject) -> gpus.Gpu | None:
    """The recipe's GPU; None if there is no such."""
    runtime = subject.gpu_runtime
    return next((one for one in gpus.gpus() if runtime is not None and one.name == runtime.gpu), None)


def _container(subject: Subject) -> releases.Container | None:
    """The container of the recipe's release; None if there is no such release."""
    runtime = subject.gpu_runtime
    return None if runtime is None or subject.release_problem else releases.container(runtime.version)


def _architecture(subject: Subject) -> Iterator[Said]:
    wanted = _wanted(subject)
    for seen in _used(subject):
        if wanted is not None and seen.sm != wanted.sm:
            yield Said(
                (GPU,),
                f"has compute capability {wanted.capability}, {_name(seen)} of this machine has {seen.sm / 10:.1f}",
                "set runtime.gpu to the machine's GPU and build again, or use another machine",
            )


def _count(subject: Subject) -> Iterator[Said]:
    here = _here(subject)
    if here.gpus is not None and len(here.gpus) < subject.world:
        have = here.gpu_problem or f"{len(here.gpus)} may be used"
        yield Said(
            (TENSOR, "runtime.pipeline_parallel", GPU),
            f"needs {subject.world} GPUs with the other sizes: {have}",
        )


def _gpu_memory(subject: Subject) -> Iterator[Said]:
    wanted, facts = _wanted(subject), rule("host.gpu_memory").facts
    for seen in _used(subject):
        others = seen.memory_mib - seen.free_mib
        if wanted is not None and seen.memory_mib < wanted.driver_mib * facts["share"]:
            text = f"has {wanted.driver_mib} MiB, {_name(seen)} of this machine {seen.memory_mib} MiB"
            yield Said((GPU,), text, "set runtime.gpu to the machine's GPU and build again")
        elif others > facts["busy_mib"]:
            text = (
                f"shares {_name(seen)} with others, who use {others} MiB of it; the KV cache will be smaller"
            )
            yield Said((GPU,), text, "end what else runs on it", "warning")


def _links(subject: Subject) -> Iterator[Said]:
    links, tensor = _here(subject).links, max(model.split.tensor for model in subject.models)
    if links is None or tensor < 2:
        return
    indices = sorted(seen.index for seen in _used(subject))[:tensor]
    slow = {
        pair: links[pair].path
        for pair in combinations(indices, 2)
        if pair in links and links[pair].path != "NV"
    }
    if slow:
        (one, other), path = next(iter(slow.items()))
        yield Said(
            (TENSOR,),
            f"is {tensor}, but GPU {one} and GPU {other} are joined by {_WAYS[path]}, not by NVLink",
            "use GPUs with NVLink (--gpus), or runtime.pipeline_parallel instead",
        )


_WAYS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe bridge of the CPU",
    "NODE": "PCIe bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}


def _driver(subject: Subject) -> Iterator[Said]:
    container = _container(subject)
    for driver in sorted({seen.driver for seen in _used(subject)}):
        if container is not None and _numbers(driver) < _numbers(container.driver):
            yield Said(
                (VERSION,),
                f"is served by {container.image}, which needs driver {container.driver}; this machine has {driver}",
                "install a newer driver, or choose an older release: pipeline versions",
            )


def _software(subject: Subject) -> Iterator[Said]:
    software, runtime, container = _here(subject).software, subject.gpu_runtime, _container(subject)
    if software is None or software.tensorrt_llm is None or runtime is None or container is None:
        return
    fix = f"serve with {container.image}"
    if software.tensorrt_llm != runtime.version:
        yield Said((VERSION,), f"is not the TensorRT-LLM {software.tensorrt_llm} that is installed", fix)
    needed = container.tensorrt or releases.release(runtime.version).tensorrt
    if (
        subject.kind == "tensorrt"
        and needed
        and software.tensorrt
        and not _same_release(software.tensorrt, needed)
    ):
        yield Said((VERSION,), f"is built with TensorRT {needed}, {software.tensorrt} is installed", fix)


def _release_of_container(subject: Subject) -> Iterator[Said]:
    software, container = _here(subject).software, _container(subject)
    inside = software.container if software is not None else None
    if inside and container is not None and container.release and inside != container.release:
        yield Said(
            (VERSION,),
            f"is in container {container.release}, this is {inside}",
            f"serve with {container.image}",
        )


def _memory(subject: Subject) -> Iterator[Said]:
    here, facts, key = _here(subject), rule("host.memory").facts, "kv_cache.host_memory_gib"
    for_cache = int(subject.recipe.kv_cache.host_memory_gib * _GIB)
    rank = sizing.largest_rank_bytes(subject) or 0
    needed = max(
        for_cache, rank * facts["copies"] + facts["worker_gib"] * _GIB if subject.kind == "tensorrt" else rank
    )
    if here.memory_bytes is not None and here.memory_bytes < needed:
        yield Said(
            (key,), _has("host memory", needed, here.memory_bytes), "a machine with more, or more ranks"
        )
    elif here.memory_available_bytes is not None and here.memory_available_bytes < needed:
        text = _has("host memory", needed, here.memory_available_bytes, "are free of it")
        yield Said((key,), text, "end what else runs here", "warning")


def _disk(subject: Subject) -> Iterator[Said]:
    store, needed = _here(subject).store, sizing.build_bytes(subject)
    if store is not None and needed is not None and store.free_bytes < needed - store.held_bytes:
        text = _has("disk", needed - store.held_bytes, store.free_bytes, f"are free in {store.folder}")
        yield Said(("model.source",), text, "free some (pipeline store gc), or name another --store")


def _temporary(subject: Subject) -> Iterator[Said]:
    temporary, least = _here(subject).temporary, rule("host.temporary").facts["least_gib"] * _GIB
    if temporary is not None and temporary.free_bytes < least:
        text = _has("temporary files", least, temporary.free_bytes, f"are free in {temporary.folder}")
        yield Said(("runtime.kind",), text, "free some, or set TMPDIR")


def _has(what: str, needed: int, there: int, how: str = "are there") -> str:
    return f"needs {needed / _GIB:.1f} GiB of {what}, {there / _GIB:.1f} GiB {how}"


def _shared_memory(subject: Subject) -> Iterator[Said]:
    shm, runtime = _here(subject).shm_bytes, subject.gpu_runtime
    if shm is None or runtime is None or subject.release_problem:
        return
    facts = launching(runtime.version)
    wanted = facts.shm_mib(subject.world)
    if shm < wanted * _MIB:
        least = subject.world > 1 and shm < facts.least_shared_memory_mib * _MIB
        yield Said(
            (TENSOR,),
            f"wants {wanted} MiB of /dev/shm for {subject.world} rank(s), {shm // _MIB} MiB are there",
            f"docker run --shm-size={wanted}m, or --ipc=host",
            "error" if least else None,
        )


def _locked_memory(subject: Subject) -> Iterator[Said]:
    here = _here(subject)
    if here.memlock_limited and subject.world > 1:
        yield Said(
            (TENSOR,),
            f"has {subject.world} ranks, and a process may lock {(here.memlock_bytes or 0) >> 10} KiB only",
            "docker run --ulimit memlock=-1, or ulimit -l unlimited",
        )


def _ports(subject: Subject) -> Iterator[Said]:
    taken = sorted((_here(subject).taken_ports or frozenset()) & set(PORTS))
    if taken:
        others = "pipeline deploy chooses others, or name them: --http-port, --grpc-port, --metrics-port"
        yield Said(
            ("name",), f"cannot be served at {', '.join(map(str, taken))}: taken by another process", others
        )


def _docker(subject: Subject) -> Iterator[Said]:
    here, runtime, container = _here(subject), subject.gpu_runtime, _container(subject)
    docker, have = here.docker, here.software.tensorrt_llm if here.software is not None else None
    if docker is None or runtime is None or container is None or have == runtime.version:
        return
    if docker.version is None:
        yield Said(
            (VERSION,),
            f"is served by {container.image}, but Docker does not answer: {docker.problem}",
            INSTALL,
        )
    elif docker.gpu_runtime is False:
        yield Said(
            (VERSION,), f"is served by {container.image}, but Docker gives containers no GPUs", INSTALL
        )


INSTALL = "install Docker and the NVIDIA Container Toolkit, or start pipeline inside the container"


def _slots(subject: Subject) -> Iterator[Said]:
    slots = _here(subject).mpi_slots
    if slots is not None and subject.world > 1 and slots < subject.world:
        text = f"needs {subject.world} ranks, mpirun counts {slots} slots here"
        yield Said(
            (TENSOR,), text, "pipeline deploy passes --oversubscribe; by hand, pass it or widen the host file"
        )


def _root(subject: Subject) -> Iterator[Said]:
    if _here(subject).is_root and subject.world > 1:
        text = f"needs {subject.world} ranks, and mpirun refuses root without --allow-run-as-root"
        yield Said((TENSOR,), text, "pipeline deploy passes it")


def _name(seen: GpuFacts) -> str:
    return f"{seen.name} (GPU {seen.index})"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _same_release(have: str, needed: str) -> bool:
    """Engines are tied to major, minor and patch; where one side says less, that much is compared."""
    ours, theirs = _numbers(have)[:3], _numbers(needed)[:3]
    length = min(len(ours), len(theirs))
    return ours[:length] == theirs[:length]


CHECKS: Mapping[str, Check] = {
    "port.arch": _architecture,
    "host.gpus": _count,
    "host.gpu_memory": _gpu_memory,
    "host.nvlink": _links,
    "host.driver": _driver,
    "port.version": _software,
    "host.container": _release_of_container,
    "host.memory": _memory,
    "host.disk": _disk,
    "host.temporary": _temporary,
    "host.shm": _shared_memory,
    "host.memlock": _locked_memory,
    "host.ports": _ports,
    "host.docker": _docker,
    "mpi.slots": _slots,
    "mpi.root": _root,
}
