"""Rules about what is installed where it is served: TensorRT-LLM, its container, programs, Docker.

Each function is one rule of contracts/data/rules/software.yaml, under its id in CHECKS: it compares what is needed with
what is there, so that a recipe is judged by it before its build, and a package before its start. What is not known of
a machine is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pipeline.contracts.rules import Severity
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.preflight.finding import Objection
from pipeline.plan.preflight.needs import MachineCheck, MachineNeeds, ServingNeeds, version_numbers

VERSION, KIND = "runtime.version", "runtime.kind"


def _software(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    have, wanted = here.software, needs.serving
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


def _container(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    have, wanted = here.software, needs.serving
    release = release_of(wanted.image) if wanted is not None else None
    if wanted is not None and release and have is not None and have.container and have.container != release:
        text = f"it is container {have.container}; it was made for {release}"
        yield Objection((VERSION,), text, _inside(needs, wanted))


def _modules(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    missing = here.software.missing if here.software is not None else ()
    if missing and needs.serving is not None:
        yield Objection(
            (KIND,),
            f"the models import {', '.join(missing)}, which Triton's Python does not have",
            "serve with an image of our Dockerfile (--image), or install them there",
        )


def _programs(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    there = here.software.programs if here.software is not None else None
    if there is None or needs.serving is None:
        return
    for program in needs.serving.programs:
        if program not in there:
            yield Objection((KIND,), f"there is no {program}", "serve inside the container that has it")


def _docker(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    wanted, docker = needs.serving, here.docker
    have = here.software.tensorrt_llm if here.software is not None else None
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
    return f"serve with {wanted.image}: {needs.serve} --container"


def release_of(image: str) -> str | None:
    """Release of Triton in an image's tag: "26.07" of 'nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3'; None if
    there is none.
    """
    match = re.search(r":(\d\d\.\d\d)-", image)
    return match[1] if match else None


def _same_release(have: str, needed: str) -> bool:
    """Engines are tied to major, minor and patch; where one side says less, that much is compared."""
    ours, theirs = version_numbers(have)[:3], version_numbers(needed)[:3]
    length = min(len(ours), len(theirs))
    return ours[:length] == theirs[:length]


CHECKS: Mapping[str, MachineCheck] = {
    "port.version": _software,
    "host.container": _container,
    "host.modules": _modules,
    "host.programs": _programs,
    "host.docker": _docker,
}
