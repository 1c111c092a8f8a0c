"""Whether a machine can serve a package: all that is wrong at once, before 100 GB are loaded.

The rules are those that recipes are held against (`pipeline.plan.preflight`); here is what a package needs, which
its deployment.json says: engines are for one compute capability, one version of TensorRT and TensorRT-LLM, and one
number of GPUs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from pipeline.contracts.gpus import gpu
from pipeline.contracts.launching import launching
from pipeline.contracts.rules import rule
from pipeline.errors import Fault, InvalidInput
from pipeline.machine.software import Software
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.preflight import Finding, MachineNeeds, ServingNeeds, machine_findings
from pipeline.plan.preflight.needs import Where
from pipeline.serving.gpu_launch import LaunchPlan
from pipeline.triton.deployment import Deployment


def preflight(
    deployment: Deployment,
    plan: LaunchPlan | None,
    here: MachineFacts,
    software: Software | None = None,
    where: Where = "local",
    served: Sequence[str] = ("RECIPE",),
) -> tuple[Finding, ...]:
    """All findings, the gravest first.

    Args:
        plan: how it is launched; None where no GPU is needed.
        here: the machine; what is not known of it is not judged.
        software: what would serve; None: unknown, as of an image that is not here yet.
        where: by processes of this machine, or in a container, which has limits of its own.
        served: the words by which `pipeline deploy` was told what to serve: a recipe, or --package and its folder.
    """
    facts = replace(here, software=software.facts()) if software is not None else here
    recipe = ("RECIPE",) if served[0] == "--package" else served
    needs = replace(
        needs_of(deployment, plan, where),
        build=shlex.join(("pipeline", "build", *recipe)),
        deploy=shlex.join(("pipeline", "deploy", *served)),
    )
    return machine_findings(needs, facts)


def needs_of(deployment: Deployment, plan: LaunchPlan | None, where: Where) -> MachineNeeds:
    """What a package asks of a machine."""
    required = deployment.requirements
    if required is None or plan is None:
        return MachineNeeds(deployment.name, deployment.runtime, where=where)
    return MachineNeeds(
        name=deployment.name,
        kind=deployment.runtime,
        values={"runtime.gpu": required.gpu, "runtime.version": required.tensorrt_llm},
        serving=ServingNeeds(
            version=required.tensorrt_llm,
            image=required.image,
            driver=required.driver,
            gpu=gpu(required.gpu),
            gpus=required.gpus,
            tensorrt=required.tensorrt,
            tensor=deployment.launch.world_size,
            shm_mib=plan.shm_mib,
            least_shm_mib=launching(required.tensorrt_llm).least_shared_memory_mib,
            rank_bytes=int(deployment.launch.weights_gib * 2**30 / max(1, required.gpus)),
            programs=plan.programs,
        ),
        where=where,
        spawns=deployment.launch.mode == "orchestrator",
    )


def port_findings(problems: Sequence[str]) -> tuple[Finding, ...]:
    """Ports that a start was told to take, and that it cannot have."""
    one = rule("host.ports")
    fix = "name others: --http-port, --grpc-port, --metrics-port"
    return tuple(
        Finding(one.id, "error", ("ports",), None, problem, one.reason, fix, one.sources)
        for problem in problems
    )


def refuse(deployment: Deployment, found: Sequence[Finding]) -> None:
    """Raises InvalidInput with all errors among the findings that are not allowed."""
    faults = [
        Fault(one.problem, key=one.keys[0], value=one.value, fix=one.fix, rule=one.rule)
        for one in found
        if one.stops
    ]
    if faults:
        raise InvalidInput(f"{deployment.name} cannot be served here", faults)
