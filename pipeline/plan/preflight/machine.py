"""Rules about a machine: its GPUs and their driver; memory, disks, limits, ports; and what is installed to serve.

Each function is one rule of devices.yaml, host.yaml or software.yaml of contracts/data/rules, under its id in
DEVICE_CHECKS, HOST_CHECKS or SOFTWARE_CHECKS: it compares what is needed with what is there, so that a recipe is judged
by it before its build, and a package before its start. What is not known of a machine is not judged.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import combinations

from pipeline.contracts.rules import Severity, rule
from pipeline.plan.machine_facts import GpuFacts, MachineFacts, contract_name, has_chip_name
from pipeline.plan.preflight.context import Objection
from pipeline.plan.preflight.needs import MachineCheck, MachineNeeds, ServingNeeds, version_numbers
from pipeline.store import human_bytes

TENSOR, GPU, VERSION = "runtime.tensor_parallel", "runtime.gpu", "runtime.version"
KIND, HOST_CACHE = "runtime.kind", "kv_cache.host_memory_gib"
FORMAT, PRECISION = "quantization.format", "runtime.precision"
# Triton's own ports, without HTTP, which few recipes open.
PORTS = (8001, 8002)
_MIB, _GIB = 2**20, 2**30


def _used(needs: MachineNeeds, machine: MachineFacts) -> tuple[tuple[GpuFacts, ...], ServingNeeds | None]:
    """The GPUs that would be used, which are the first ones, as CUDA and Docker take them; and what they are for."""
    wanted = needs.serving
    return ((machine.gpus or ())[: wanted.gpus] if wanted is not None else (), wanted)


def _count(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    wanted = needs.serving
    if wanted is None or machine.gpus is None or len(machine.gpus) >= wanted.gpus:
        return
    if not machine.gpus:
        problem = machine.gpu_problem or "none of the GPUs of this machine may be used"
        yield Objection((GPU,), f"{problem}; it needs {wanted.gpus} x {wanted.gpu.name}")
    else:
        smaller = 1 << (len(machine.gpus).bit_length() - 1)
        yield Objection(
            (TENSOR, "runtime.pipeline_parallel", GPU),
            f"{len(machine.gpus)} GPUs may be used, it needs {wanted.gpus}",
            f"{needs.build} --set {TENSOR}={smaller}",
        )


def _architecture(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, machine)
    if wanted is None:
        return
    fitting = [str(device.index) for device in machine.gpus or () if device.sm == wanted.gpu.sm][
        : wanted.gpus
    ]
    for sm in sorted({device.sm for device in used} - {wanted.gpu.sm}):
        strangers = [device for device in used if device.sm == sm]
        yield Objection(
            (GPU,),
            f"{_listed(strangers)}: compute capability {sm / 10:.1f}, it is for {wanted.gpu.capability}",
            f"--gpus {','.join(fitting)}"
            if len(fitting) == wanted.gpus
            else _for_this(needs, strangers[0], wanted),
        )


def _chip(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, machine)
    for device in used:
        if wanted is not None and device.sm == wanted.gpu.sm and not has_chip_name(device, wanted.gpu):
            yield Objection(
                (GPU,),
                f"{_listed([device])} is not a {wanted.gpu.name}: it runs there, at another speed than it was tuned "
                "for",
                _for_this(needs, device, wanted),
            )


def _gpu_memory(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, machine)
    facts = rule("host.gpu_memory").facts
    for device in used:
        assert wanted is not None, "GPUs are used for something"
        used_mib, least = device.memory_mib - device.free_mib, (wanted.rank_bytes or 0) >> 20
        if device.memory_mib < wanted.gpu.driver_mib * facts["share"]:
            yield Objection(
                (GPU,),
                f"{_listed([device])} has {device.memory_mib} MiB, the limits were made for "
                f"{wanted.gpu.driver_mib} MiB",
                _for_this(needs, device, wanted),
            )
        elif device.free_mib < least:
            yield Objection(
                (GPU,),
                f"{_listed([device])} has {device.free_mib} MiB free, the weights alone need {least} MiB",
                "end what else runs on it (nvidia-smi lists it), or name other GPUs with --gpus",
            )
        elif used_mib > facts["busy_mib"]:
            yield Objection(
                (GPU,),
                f"{_listed([device])}: {used_mib} MiB are in use by others, so that the KV cache will be smaller",
                "end what else runs on it",
                "warning",
            )


def _links(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, machine)
    if machine.links is None or wanted is None or wanted.tensor < 2:
        return
    pairs = combinations(sorted(device.index for device in used)[: wanted.tensor], 2)
    slow = {
        pair: machine.links[pair].path
        for pair in pairs
        if pair in machine.links and machine.links[pair].path != "NV"
    }
    if slow:
        (first, other), path = next(iter(slow.items()))
        ways: Mapping[str, str] = rule("host.nvlink").facts["ways"]
        yield Objection(
            (TENSOR,),
            f"GPU {first} and GPU {other}, which share each layer, are joined by {ways[path]}, not by NVLink",
            "use GPUs with NVLink (--gpus), or runtime.pipeline_parallel instead",
        )


def _driver(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, machine)
    for driver in sorted({device.driver for device in used}):
        if wanted is not None and version_numbers(driver) < version_numbers(wanted.driver):
            yield Objection(
                (VERSION,),
                f"driver {driver} is older than {wanted.driver}, the oldest that {wanted.image} runs with",
                "install a newer driver, or build with an older runtime.version: pipeline versions",
            )


def _for_this(needs: MachineNeeds, device: GpuFacts, wanted: ServingNeeds) -> str:
    known = contract_name(device)
    return f"{needs.build} --set {GPU}={known}" if known else f"use a {wanted.gpu.name}"


def _listed(devices: list[GpuFacts]) -> str:
    return f"{devices[0].name} (GPU {', '.join(str(device.index) for device in devices)})"


DEVICE_CHECKS: Mapping[str, MachineCheck] = {
    "host.gpus": _count,
    "port.arch": _architecture,
    "port.chip": _chip,
    "host.gpu_memory": _gpu_memory,
    "host.nvlink": _links,
    "host.driver": _driver,
}


def _memory(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    have, free = machine.memory_bytes, machine.memory_available_bytes
    if have is not None and have < needs.host_cache_bytes:
        yield Objection(
            (HOST_CACHE,),
            _lacks("host memory", needs.host_cache_bytes, have),
            "fewer, or a machine with more",
        )
    elif have is not None and have < needs.build_memory_bytes:
        text = _lacks("host memory to build", needs.build_memory_bytes, have)
        yield Objection((HOST_CACHE,), text, "build on a machine with more, or over more ranks", "warning")
    elif free is not None and free < max(needs.host_cache_bytes, needs.build_memory_bytes):
        text = _lacks("host memory", max(needs.host_cache_bytes, needs.build_memory_bytes), free, "are free")
        yield Objection((HOST_CACHE,), text, "end what else runs here", "warning")


def _calibration(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    """On GPUs, what they do not hold lies in host memory; without one, all of it."""
    facts, free = rule("host.calibration").facts, machine.memory_available_bytes
    if free is None or not needs.calibrated_weights:
        return
    elsewhere = "calibrate on a machine with more memory, or with a GPU that holds it"
    if not machine.gpus:
        needed = needs.calibrated_weights * facts["cpu_bytes"]
        if free < needed:
            yield Objection(
                (FORMAT,), _lacks("memory to calibrate on a CPU", needed, free, "are free"), elsewhere
            )
        return
    needed = needs.calibrated_weights * facts["gpu_bytes"]
    on_gpus = sum(device.free_mib for device in machine.gpus) * _MIB
    if on_gpus + free < needed:
        text = _lacks("memory to calibrate", needed, on_gpus + free, "are free on GPUs and host together")
        yield Objection((FORMAT,), text, elsewhere)
    elif on_gpus < needed:
        text = _lacks(
            "GPU memory to calibrate",
            needed,
            on_gpus,
            "are free; the rest lies in host memory, which is slow",
        )
        yield Objection((FORMAT,), text, elsewhere, "warning")


def _bf16(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    if needs.bf16 and machine.bf16 is False:
        yield Objection((PRECISION,), "this processor has no bf16 arithmetic", f"--set {PRECISION}=auto")


def _disk(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    if machine.store is None or needs.build_bytes is None:
        return
    lacking = needs.build_bytes - machine.store.held_bytes
    if machine.store.free_bytes < lacking:
        text = _lacks("disk", lacking, machine.store.free_bytes, f"are free in {machine.store.folder}")
        collect = shlex.join(("pipeline", "store", "gc", "--store", machine.store.folder))
        yield Objection(("model.source",), text, f"free some ({collect}), or name another --store")


def _temporary(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    del needs  # whatever it is
    least = int(rule("host.temporary").facts["least_gib"] * _GIB)
    if machine.temporary is not None and machine.temporary.free_bytes < least:
        text = _lacks(
            "temporary files", least, machine.temporary.free_bytes, f"are free in {machine.temporary.folder}"
        )
        yield Objection((KIND,), text, "free some, or set TMPDIR")


def _lacks(resource: str, needed: int, available: int, how: str = "are there") -> str:
    return f"it needs {human_bytes(needed)} of {resource}, {human_bytes(available)} {how}"


def _shared_memory(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    wanted = needs.serving
    if machine.shm_bytes is None or wanted is None or needs.where == "docker":
        return  # a container is given its own
    if machine.shm_bytes >= wanted.shm_mib * _MIB:
        return
    spans = wanted.gpus > 1 and machine.shm_bytes < wanted.least_shm_mib * _MIB
    yield Objection(
        (TENSOR,),
        f"/dev/shm has {machine.shm_bytes // _MIB} MiB, {wanted.shm_mib} MiB are wanted",
        f"docker run --shm-size={wanted.shm_mib}m, or --ipc=host",
        "error" if spans else None,
    )


def _locked_memory(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    ranks = needs.serving.gpus if needs.serving is not None else 1
    if machine.memlock_limited and ranks > 1 and needs.where != "docker":
        yield Objection(
            (TENSOR,),
            f"a process may lock {(machine.memlock_bytes or 0) >> 10} KiB of memory only",
            "docker run --ulimit memlock=-1, or ulimit -l unlimited",
        )


def _ports(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    taken = sorted((machine.taken_ports or frozenset()) & set(PORTS))
    if taken and needs.where == "anywhere":  # a start names the ports that it takes
        fix = "pipeline serve chooses others, or name them: triton.grpc_port, triton.metrics_port"
        yield Objection(("name",), f"ports {', '.join(map(str, taken))} are taken by another process", fix)


def _spawning(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    if machine.batch_system and needs.spawns and needs.where != "docker":  # which hides the job
        yield Objection(
            ("draft",),
            f"two engines are served by ranks that MPI spawns; within a job of {machine.batch_system} it cannot",
            "serve outside of the job, or build without a draft",
        )


def _slots(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    ranks = needs.serving.gpus if needs.serving is not None else 1
    if machine.mpi_slots is not None and ranks > 1 and machine.mpi_slots < ranks:
        by_hand = "pipeline serve passes --oversubscribe; by hand, pass it or widen the host file"
        yield Objection(
            (TENSOR,), f"it needs {ranks} ranks, mpirun counts {machine.mpi_slots} slots here", by_hand
        )


def _root(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    if machine.is_root and needs.serving is not None and needs.serving.gpus > 1:
        yield Objection(
            (TENSOR,), "mpirun refuses root without --allow-run-as-root", "pipeline serve passes it"
        )


HOST_CHECKS: Mapping[str, MachineCheck] = {
    "host.memory": _memory,
    "host.calibration": _calibration,
    "host.bf16": _bf16,
    "host.disk": _disk,
    "host.temporary": _temporary,
    "host.shm": _shared_memory,
    "host.memlock": _locked_memory,
    "host.ports": _ports,
    "mpi.orchestrator": _spawning,
    "mpi.slots": _slots,
    "mpi.root": _root,
}


def _software(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    have, wanted = machine.software, needs.serving
    if have is None or wanted is None:
        return
    inside = _inside(needs, wanted)
    if have.tensorrt_llm is None:
        if needs.where != "anywhere":
            where = f"Triton {have.container}" if have.container else "this machine"
            yield Objection((VERSION,), f"TensorRT-LLM is not installed in {where}", inside)
        return
    if have.tensorrt_llm != wanted.version:
        yield Objection(
            (VERSION,),
            f"TensorRT-LLM {have.tensorrt_llm} is installed, it was made for {wanted.version}",
            f"{inside}; or {needs.build} --set {VERSION}={have.tensorrt_llm}",
        )
    if wanted.tensorrt is not None and have.tensorrt is None:
        yield Objection(
            (VERSION,), "the version of TensorRT cannot be told: no distribution says it", "", "warning"
        )
    elif wanted.tensorrt is not None and not _same_release(have.tensorrt or "", wanted.tensorrt):
        yield Objection(
            (VERSION,),
            f"TensorRT {have.tensorrt} is installed, engines are built with {wanted.tensorrt}",
            f"{inside}; or build again in this container: {needs.build}",
        )


def _container(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    have, wanted = machine.software, needs.serving
    release = release_of(wanted.image) if wanted is not None else None
    if wanted is not None and release and have is not None and have.container and have.container != release:
        text = f"it is container {have.container}; it was made for {release}"
        yield Objection((VERSION,), text, _inside(needs, wanted))


def _modules(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    missing = machine.software.missing if machine.software is not None else ()
    if missing and needs.serving is not None:
        yield Objection(
            (KIND,),
            f"the models import {', '.join(missing)}, which Triton's Python does not have",
            "serve with an image of our Dockerfile (triton.image), or install them there",
        )


def _programs(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    programs = machine.software.programs if machine.software is not None else None
    if programs is None or needs.serving is None:
        return
    for program in needs.serving.programs:
        if program not in programs:
            yield Objection((KIND,), f"there is no {program}", "serve inside the container that has it")


def _docker(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Objection]:
    wanted, docker = needs.serving, machine.docker
    have = machine.software.tensorrt_llm if machine.software is not None else None
    installed = wanted is not None and have == wanted.version and needs.where == "anywhere"
    if docker is None or wanted is None or installed or needs.where == "local":
        return
    install = "install Docker and the NVIDIA Container Toolkit, or start pipeline inside the container"
    severity: Severity | None = "error" if needs.where == "docker" else None
    if docker.version is None:
        text = f"{wanted.image} serves it, but Docker does not answer: {docker.problem}"
        yield Objection((VERSION,), text, docker.fix or install, severity)
    elif docker.gpu_runtime is False:
        text = f"{wanted.image} serves it, but containers cannot be given GPUs: no nvidia runtime and no CDI devices"
        yield Objection((VERSION,), text, install, severity)


def _inside(needs: MachineNeeds, wanted: ServingNeeds) -> str:
    return f"serve with {wanted.image}: {needs.serve} --set triton.container=true"


def release_of(image: str) -> str | None:
    """Release of Triton in an image's tag: "26.07" of 'nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3'; None if
    there is none.
    """
    match = re.search(r":(\d\d\.\d\d)-", image)
    return match[1] if match else None


def _same_release(have: str, needed: str) -> bool:
    """Engines are tied to major, minor and patch; where one side says less, that much is compared."""
    installed, required = version_numbers(have)[:3], version_numbers(needed)[:3]
    length = min(len(installed), len(required))
    return installed[:length] == required[:length]


SOFTWARE_CHECKS: Mapping[str, MachineCheck] = {
    "port.version": _software,
    "host.container": _container,
    "host.modules": _modules,
    "host.programs": _programs,
    "host.docker": _docker,
}
