"""Rules about GPUs: how many, which, with what memory, how they are joined, and their driver.

Each function is one rule of contracts/data/rules/devices.yaml, under its id in CHECKS: it compares what is needed with
what is there, so that a recipe is judged by it before its build, and a package before its start. What is not known of
a machine is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from pipeline.contracts.rules import rule
from pipeline.plan.machine_facts import GpuFacts, MachineFacts, contract_name, has_chip_name
from pipeline.plan.preflight.finding import Objection
from pipeline.plan.preflight.needs import MachineCheck, MachineNeeds, ServingNeeds, version_numbers

TENSOR, GPU, VERSION = "runtime.tensor_parallel", "runtime.gpu", "runtime.version"


def _used(needs: MachineNeeds, here: MachineFacts) -> tuple[tuple[GpuFacts, ...], ServingNeeds | None]:
    """The GPUs that would be used, which are the first ones, as CUDA and Docker take them; and what they are for."""
    wanted = needs.serving
    return ((here.gpus or ())[: wanted.gpus] if wanted is not None else (), wanted)


def _count(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    wanted = needs.serving
    if wanted is None or here.gpus is None or len(here.gpus) >= wanted.gpus:
        return
    if not here.gpus:
        problem = here.gpu_problem or "none of the GPUs of this machine may be used"
        yield Objection((GPU,), f"{problem}; it needs {wanted.gpus} x {wanted.gpu.name}")
    else:
        smaller = 1 << (len(here.gpus).bit_length() - 1)
        yield Objection(
            (TENSOR, "runtime.pipeline_parallel", GPU),
            f"{len(here.gpus)} GPUs may be used, it needs {wanted.gpus}",
            f"{needs.build} --set {TENSOR}={smaller}",
        )


def _architecture(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, here)
    if wanted is None:
        return
    right = [str(seen.index) for seen in here.gpus or () if seen.sm == wanted.gpu.sm][: wanted.gpus]
    for sm in sorted({seen.sm for seen in used} - {wanted.gpu.sm}):
        others = [seen for seen in used if seen.sm == sm]
        yield Objection(
            (GPU,),
            f"{_listed(others)}: compute capability {sm / 10:.1f}, it is for {wanted.gpu.capability}",
            f"--gpus {','.join(right)}" if len(right) == wanted.gpus else _for_this(needs, others[0], wanted),
        )


def _chip(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, here)
    for seen in used:
        if wanted is not None and seen.sm == wanted.gpu.sm and not has_chip_name(seen, wanted.gpu):
            yield Objection(
                (GPU,),
                f"{_listed([seen])} is not a {wanted.gpu.name}: it runs there, at another speed than it was tuned for",
                _for_this(needs, seen, wanted),
            )


def _gpu_memory(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, here)
    facts = rule("host.gpu_memory").facts
    for seen in used:
        assert wanted is not None, "GPUs are used for something"
        others, least = seen.memory_mib - seen.free_mib, (wanted.rank_bytes or 0) >> 20
        if seen.memory_mib < wanted.gpu.driver_mib * facts["share"]:
            yield Objection(
                (GPU,),
                f"{_listed([seen])} has {seen.memory_mib} MiB, the limits were made for {wanted.gpu.driver_mib} MiB",
                _for_this(needs, seen, wanted),
            )
        elif seen.free_mib < least:
            yield Objection(
                (GPU,),
                f"{_listed([seen])} has {seen.free_mib} MiB free, the weights alone need {least} MiB",
                "end what else runs on it (nvidia-smi lists it), or name other GPUs with --gpus",
            )
        elif others > facts["busy_mib"]:
            yield Objection(
                (GPU,),
                f"{_listed([seen])}: {others} MiB are in use by others, so that the KV cache will be smaller",
                "end what else runs on it",
                "warning",
            )


def _links(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, here)
    if here.links is None or wanted is None or wanted.tensor < 2:
        return
    pairs = combinations(sorted(seen.index for seen in used)[: wanted.tensor], 2)
    slow = {
        pair: here.links[pair].path for pair in pairs if pair in here.links and here.links[pair].path != "NV"
    }
    if slow:
        (one, other), path = next(iter(slow.items()))
        ways: Mapping[str, str] = rule("host.nvlink").facts["ways"]
        yield Objection(
            (TENSOR,),
            f"GPU {one} and GPU {other}, which share each layer, are joined by {ways[path]}, not by NVLink",
            "use GPUs with NVLink (--gpus), or runtime.pipeline_parallel instead",
        )


def _driver(needs: MachineNeeds, here: MachineFacts) -> Iterator[Objection]:
    used, wanted = _used(needs, here)
    for driver in sorted({seen.driver for seen in used}):
        if wanted is not None and version_numbers(driver) < version_numbers(wanted.driver):
            yield Objection(
                (VERSION,),
                f"driver {driver} is older than {wanted.driver}, the oldest that {wanted.image} runs with",
                "install a newer driver, or build with an older runtime.version: pipeline versions",
            )


def _for_this(needs: MachineNeeds, seen: GpuFacts, wanted: ServingNeeds) -> str:
    known = contract_name(seen)
    return f"{needs.build} --set {GPU}={known}" if known else f"use a {wanted.gpu.name}"


def _listed(seen: list[GpuFacts]) -> str:
    return f"{seen[0].name} (GPU {', '.join(str(one.index) for one in seen)})"


CHECKS: Mapping[str, MachineCheck] = {
    "host.gpus": _count,
    "port.arch": _architecture,
    "port.chip": _chip,
    "host.gpu_memory": _gpu_memory,
    "host.nvlink": _links,
    "host.driver": _driver,
}
