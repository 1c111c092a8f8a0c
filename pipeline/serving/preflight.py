"""Decide whether a machine can serve a package: all that is wrong at once, before 100 GB are loaded.

The rules are those of recipes (`pipeline.plan.preflight`); this file has the needs of a package, by its
deployment.json: engines are for one compute capability, one version of TensorRT and TensorRT-LLM, and one
number of GPUs.
"""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.contracts.gpus import gpu
from pipeline.contracts.launching import launch_facts
from pipeline.contracts.rules import rule
from pipeline.errors import Fault, InvalidInput
from pipeline.machine.docker import Image
from pipeline.machine.inventory import take
from pipeline.machine.programs import Software, software_here, software_of_image
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.preflight import Finding, MachineNeeds, ServingNeeds, allow, machine_findings
from pipeline.plan.preflight.needs import Where
from pipeline.serving.launch import Launch, ServeOptions
from pipeline.serving.launch_gpu import CHECKED, GpuPlace, plan_launch
from pipeline.triton.deployment import REPOSITORY, Deployment


def preflight(
    deployment: Deployment,
    plan: Launch | None,
    machine: MachineFacts,
    software: Software | None = None,
    where: Where = "local",
    served: Sequence[str] = ("RECIPE",),
    machines: int = 1,
) -> tuple[Finding, ...]:
    """Find all that keeps a machine from serving a package, the gravest first.

    Args:
        plan: Launch plan; None where no GPU is needed.
        machine: Facts of the machine; unknown facts are not judged.
        software: Software that would serve; None for unknown, as of an image that is not here yet.
        where: Processes of this machine, or a container, which has limits of its own.
        served: Arguments of `pipeline serve` that name the package: a recipe, or --package and its folder.
        machines: Number of machines that share the ranks.
    """
    facts = replace(machine, software=software.facts()) if software is not None else machine
    recipe = ("RECIPE",) if served[0] == "--package" else served
    needs = replace(
        needs_of(deployment, plan, where, machines),
        build=shlex.join(("pipeline", "build", *recipe)),
        serve=shlex.join(("pipeline", "serve", *served)),
    )
    return machine_findings(needs, facts)


def needs_of(deployment: Deployment, plan: Launch | None, where: Where, machines: int = 1) -> MachineNeeds:
    """Work out what a package asks of each of the machines that share its ranks."""
    required = deployment.requirements
    if required is None or plan is None:
        return MachineNeeds(deployment.name, deployment.runtime, where=where)
    gpus = required.gpus // machines
    return MachineNeeds(
        name=deployment.name,
        kind=deployment.runtime,
        values={"runtime.gpu": required.gpu, "runtime.version": required.tensorrt_llm},
        serving=ServingNeeds(
            version=required.tensorrt_llm,
            image=required.image,
            driver=required.driver,
            gpu=gpu(required.gpu),
            gpus=gpus,
            tensorrt=required.tensorrt,
            tensor=min(deployment.launch.world_size, gpus) if machines > 1 else deployment.launch.world_size,
            shm_mib=plan.shm_mib,
            least_shm_mib=launch_facts(required.tensorrt_llm).least_shared_memory_mib,
            rank_bytes=int(deployment.launch.weights_gib * 2**30 / max(1, required.gpus)),
            programs=plan.programs,
        ),
        where=where,
        spawns=deployment.launch.mode == "orchestrator",
    )


def refuse(deployment: Deployment, findings: Sequence[Finding]) -> None:
    """Raise InvalidInput with all errors among the findings that are not allowed."""
    faults = [
        Fault(finding.problem, key=finding.keys[0], value=finding.value, fix=finding.fix, rule=finding.rule)
        for finding in findings
        if finding.stops
    ]
    if faults:
        raise InvalidInput(f"{deployment.name} cannot be served here", faults)


_OF_GPUS, _LIMITS = ("gpus", "topology", "temporary"), ("shm_bytes", "ulimits")
# A driver that no process holds open takes long to answer.
_PROBE_DEADLINE_S = 60.0
# Triton puts it on the path itself.
_OF_TRITON = "triton_python_backend_utils"


def check_local(deployment: Deployment, package: Path, options: ServeOptions) -> tuple[Finding, ...]:
    """Find what keeps this machine, or the container that this runs in, from serving a package."""
    plan = _plan(deployment, options)
    if plan is None:
        return _with_ports(preflight(deployment, None, _probe(options, "temporary")), options)
    software = software_here(plan.programs, modules_of(package))
    machine = _probe(options, *_OF_GPUS, *_LIMITS)
    machines = 1 if options.group is None else len(options.group.hosts)
    return _with_ports(
        preflight(deployment, plan, machine, software, "local", _argv(package, options), machines), options
    )


def check_container(
    deployment: Deployment, package: Path, options: ServeOptions, image: Image | None
) -> tuple[Finding, ...]:
    """Find what keeps a container of this host from serving a package; without `image`, the image is not asked."""
    software = software_of_image(image.reference, modules_of(package)) if image else None
    machine, plan = _probe(options, *_OF_GPUS, "docker"), _plan(deployment, options)
    return _with_ports(
        preflight(deployment, plan, machine, software, "docker", _argv(package, options)), options
    )


def _argv(package: Path, options: ServeOptions) -> tuple[str, ...]:
    """Arguments that name the package on a command line."""
    return options.recipe or ("--package", str(package.absolute()))


def _with_ports(findings: tuple[Finding, ...], options: ServeOptions) -> tuple[Finding, ...]:
    """Add ports that are taken, unless the server chooses others by itself, and mark what the options allow."""
    ports, fix = rule("host.ports"), "name others: triton.http_port, triton.grpc_port, triton.metrics_port"
    taken = (
        Finding(ports.id, "error", ("ports",), None, problem, ports.reason, fix, ports.sources)
        for problem in ([] if options.ports.movable else options.ports.faults(options.triton.address))
    )
    return allow((*taken, *findings), options.allowed)


def _probe(options: ServeOptions, *probes: str) -> MachineFacts:
    return take(only=probes, deadline_s=_PROBE_DEADLINE_S).facts(options.gpus)


def _plan(deployment: Deployment, options: ServeOptions) -> Launch | None:
    if deployment.runtime == "cpu":
        return None
    return plan_launch(deployment, CHECKED, GpuPlace(devices=options.gpus, group=options.group))


def modules_of(package: Path) -> tuple[str, ...]:
    """List modules that the Python models of a package import, and that neither they nor Python bring along."""
    imported: set[str] = set()
    for version in (package / REPOSITORY).glob("*/1"):
        sources = list(version.rglob("*.py"))
        own = {source.stem for source in sources} | {source.parent.name for source in sources}
        for source in sources:
            imported |= _imports(source) - own
    return tuple(sorted(imported - sys.stdlib_module_names - {_OF_TRITON}))


def _imports(source: Path) -> set[str]:
    """First names of the modules that a file imports when it is loaded or later."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"), filename=str(source))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
