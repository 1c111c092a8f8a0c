"""Whether a machine can serve a deployment: pure, and all that is wrong at once, before 100 GB are loaded.

Engines are for one compute capability, one version of TensorRT and TensorRT-LLM, and one number of GPUs; what is
written in deployment.json is compared with what the machine is. Each finding says what would help, as a command where
there is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from pipeline.contracts.gpus import gpu
from pipeline.contracts.launching import launching
from pipeline.contracts.rules import rule
from pipeline.errors import Fault, InvalidInput
from pipeline.machine.products import contract_name, is_chip
from pipeline.machine.software import Software
from pipeline.planning.machine_facts import GpuFacts, MachineFacts
from pipeline.triton.deployment import Deployment, Requirements
from pipeline.triton.gpu_launch import LaunchPlan

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about the machine that a deployment cannot be served with, or only badly."""

    severity: Literal["error", "warning"]
    subject: str  # "GPU", "driver", …
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.subject}: {self.problem}"
        return f"{text} ({self.fix})" if self.fix else text


def refuse(deployment: Deployment, findings: list[Finding]) -> None:
    """Raises InvalidInput with all errors among the findings."""
    faults = [
        Fault(found.problem, key=found.subject, fix=found.fix)
        for found in findings
        if found.severity == "error"
    ]
    if faults:
        raise InvalidInput(f"{deployment.name} cannot be served here", faults)


def preflight(
    deployment: Deployment, plan: LaunchPlan | None, here: MachineFacts, software: Software | None = None
) -> list[Finding]:
    """All findings, the gravest things first.

    Args:
        plan: how it is launched; None where no GPU is needed.
        here: the machine; what is not known of it is not judged.
        software: what would serve; None: unknown, as of an image that is not here yet.
    """
    found: list[Finding] = []
    requirements = deployment.requirements
    if requirements is not None and plan is not None:
        # The first ones, in their own order, as CUDA and Docker take them.
        used = (here.gpus or ())[: requirements.gpus]
        found += _gpus(deployment.name, requirements, here, used)
        found += _memory(deployment, used)
        found += _driver(requirements, used)
        found += _links(deployment, here, used)
        if software is not None:
            found += _software(deployment.name, requirements, software)
            found += _programs(plan, software)
        if software is not None and software.own:
            found += _limits(requirements, plan, here)
    found += _temporary(here)
    return sorted(found, key=lambda finding: finding.severity != "error")


def _temporary(here: MachineFacts) -> Iterator[Finding]:
    """Room for the mirror, logs, and what libraries unpack."""
    least = rule("host.temporary").facts["least_gib"] * _GIB
    if here.temporary is not None and here.temporary.free_bytes < least:
        free = f"{here.temporary.free_bytes / _GIB:.1f} GiB are free for temporary files"
        yield Finding("error", "disk", free, "free some, or set TMPDIR")


def _gpus(
    name: str, needed: Requirements, here: MachineFacts, used: tuple[GpuFacts, ...]
) -> Iterator[Finding]:
    if here.gpus is None:
        return
    if not here.gpus:
        problem = here.gpu_problem or "none of the GPUs of this machine may be used"
        yield Finding("error", "GPU", f"{problem}; it needs {needed.gpus} x {needed.gpu}")
        return
    if len(used) < needed.gpus:
        yield Finding(
            "error",
            "GPU",
            f"{len(used)} may be used, the engines were built for {needed.gpus}",
            f"pipeline build {name} --set runtime.tensor_parallel={_power_of_two(len(used))}",
        )
    right = [str(seen.index) for seen in here.gpus if seen.sm == needed.sm][: needed.gpus]
    for sm in sorted({seen.sm for seen in used} - {needed.sm}):
        others = [seen for seen in used if seen.sm == sm]
        known = contract_name(others[0])
        build = f"pipeline build {name} --set runtime.gpu={known}" if known else f"serve on {needed.gpu}"
        yield Finding(
            "error",
            "GPU",
            f"{_listed(others)}: compute capability {sm / 10:.1f}, the engines were built for {needed.gpu} "
            f"({needed.sm / 10:.1f})",
            f"--gpus {','.join(right)}" if len(right) == needed.gpus else build,
        )
    wanted = gpu(needed.gpu)
    for seen in used:
        if seen.sm == needed.sm and not is_chip(seen, wanted):
            yield Finding(
                "warning",
                "GPU",
                f"{_listed([seen])} is not a {needed.gpu}: the engines run on it, at another speed than they were "
                "tuned for",
                f"pipeline build {name} --set runtime.gpu={contract_name(seen) or '…'}",
            )


def _memory(deployment: Deployment, used: tuple[GpuFacts, ...]) -> Iterator[Finding]:
    needed = deployment.requirements
    assert needed is not None, "the caller looked"
    wanted_mib, facts = gpu(needed.gpu).driver_mib, rule("host.gpu_memory").facts
    share_mib = deployment.launch.weights_gib * 1024 / max(1, needed.gpus)
    for seen in used:
        if seen.memory_mib < wanted_mib * facts["share"]:
            yield Finding(
                "error",
                "GPU memory",
                f"{_listed([seen])} has {seen.memory_mib} MiB, the limits were made for {wanted_mib} MiB",
                f"pipeline build {deployment.name} --set runtime.gpu={contract_name(seen) or '…'}",
            )
        elif seen.free_mib < share_mib:
            yield Finding(
                "error",
                "GPU memory",
                f"{_listed([seen])} has {seen.free_mib} MiB free, the weights alone need {share_mib:.0f} MiB",
                "end what else runs on it (nvidia-smi lists it), or name other GPUs with --gpus",
            )
        elif seen.memory_mib - seen.free_mib > facts["busy_mib"]:
            yield Finding(
                "warning",
                "GPU memory",
                f"{_listed([seen])}: {seen.memory_mib - seen.free_mib} MiB are in use by others, so that the KV cache "
                "will be smaller",
            )


def _driver(needed: Requirements, used: tuple[GpuFacts, ...]) -> Iterator[Finding]:
    for driver in sorted({seen.driver for seen in used}):
        if _numbers(driver) < _numbers(needed.driver):
            yield Finding(
                "error",
                "driver",
                f"{driver} is older than {needed.driver}, the oldest that {needed.image} runs with",
                "install a newer driver, or build with an older runtime.version: pipeline versions",
            )


def _software(name: str, needed: Requirements, have: Software) -> Iterator[Finding]:
    inside = f"serve with {needed.image}: pipeline deploy {name} --target docker"
    if have.tensorrt_llm is None:
        where = f"Triton {have.release}" if have.release else "this machine"
        yield Finding("error", "TensorRT-LLM", f"it is not installed in {where}", inside)
    elif have.tensorrt_llm != needed.tensorrt_llm:
        yield Finding(
            "error",
            "TensorRT-LLM",
            f"{have.tensorrt_llm} is installed, the package was made for {needed.tensorrt_llm}",
            f"{inside}; or pipeline build {name} --set runtime.version={have.tensorrt_llm}",
        )
    if needed.tensorrt is not None and have.tensorrt_llm is not None:
        if have.tensorrt is None:
            yield Finding("warning", "TensorRT", "its version cannot be told: no distribution says it")
        elif not _same_release(have.tensorrt, needed.tensorrt):
            yield Finding(
                "error",
                "TensorRT",
                f"{have.tensorrt} is installed, the engines were built with {needed.tensorrt}",
                f"{inside}; or build again in this container: pipeline build {name}",
            )
    if have.missing:
        yield Finding(
            "error",
            "Python modules",
            f"the models import {', '.join(have.missing)}, which Triton's Python does not have",
            "serve with an image of our Dockerfile (--image), or install them there",
        )
    release = release_of(needed.image)
    if have.release and release and have.release != release:
        yield Finding(
            "warning",
            "container",
            f"it is release {have.release}; the package was made for {release}",
            inside,
        )


def _programs(plan: LaunchPlan, have: Software) -> Iterator[Finding]:
    for program in plan.programs:
        if have.programs is not None and program not in have.programs:
            yield Finding(
                "error", "program", f"there is no {program}", "serve inside the container that has it"
            )


def _links(deployment: Deployment, here: MachineFacts, used: tuple[GpuFacts, ...]) -> Iterator[Finding]:
    """Ranks of one engine, which exchange results in every layer."""
    if here.links is None or deployment.launch.world_size < 2:
        return
    pairs = combinations(sorted(seen.index for seen in used)[: deployment.launch.world_size], 2)
    slow = [pair for pair in pairs if pair in here.links and here.links[pair].path != "NV"]
    if slow:
        (one, other), path = slow[0], here.links[slow[0]].path
        yield Finding(
            "warning",
            "NVLink",
            f"GPU {one} and GPU {other} are joined over PCIe ({path}), and the ranks of an engine wait for each other "
            "in every layer",
            "name GPUs that NVLink joins with --gpus (nvidia-smi topo -m shows them)",
        )


def _limits(needed: Requirements, plan: LaunchPlan, here: MachineFacts) -> Iterator[Finding]:
    least = launching(needed.tensorrt_llm).least_shared_memory_mib
    shm_mib = None if here.shm_bytes is None else here.shm_bytes >> 20
    if shm_mib is not None and shm_mib < plan.shm_mib:
        spans = needed.gpus > 1 and shm_mib < least
        yield Finding(
            "error" if spans else "warning",
            "/dev/shm",
            f"{shm_mib} MiB, {plan.shm_mib} MiB are wanted",
            f"docker run --shm-size={plan.shm_mib}m, or --ipc=host",
        )
    if here.memlock_bytes is not None and needed.gpus > 1:
        yield Finding(
            "warning",
            "locked memory",
            f"a process may lock {here.memlock_bytes >> 10} KiB only",
            "docker run --ulimit memlock=-1, or ulimit -l unlimited",
        )


def containers(here: MachineFacts) -> list[Finding]:
    """What keeps Docker from giving GPUs to a container."""
    if here.docker is None or here.docker.gpu_runtime is not False:
        return []
    problem = "containers cannot be given GPUs: no nvidia runtime and no CDI devices"
    return [Finding("error", "docker", problem, "install the NVIDIA Container Toolkit")]


def release_of(image: str) -> str | None:
    """'nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3' -> '26.07'"""
    match = re.search(r":(\d\d\.\d\d)-", image)
    return match[1] if match else None


def _listed(seen: list[GpuFacts]) -> str:
    return f"{seen[0].name} (GPU {', '.join(str(one.index) for one in seen)})"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _same_release(have: str, needed: str) -> bool:
    """Engines are tied to major, minor and patch; where one side says less, that much is compared."""
    ours, theirs = _numbers(have)[:3], _numbers(needed)[:3]
    length = min(len(ours), len(theirs))
    return ours[:length] == theirs[:length]


def _power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1)
