"""The command that starts Triton with TensorRT-LLM, and its processes in the container that this runs in.

Modes are those of `LaunchSpec`; their options are facts of `pipeline.contracts.launching`. `preflight` decides whether
the machine fits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.contracts.launching import LaunchFacts, launch_facts, tracing
from pipeline.errors import Fault, InvalidInput
from pipeline.machine.host import mpi_slots
from pipeline.serving.launch import HostGroup, Launch, Start, check_models, mirror
from pipeline.serving.ports import Listeners, Ports
from pipeline.triton.deployment import CONTAINER_ROOT, FILE, REPOSITORY, Deployment, LaunchSpec

# Start of a plan that is made to see whether there is one, and what it needs.
CHECKED = Start(Path(), Listeners.at(Ports(None, 8001, 8002)), "check-")


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """Machine or container that a server with TensorRT-LLM runs in; paths are those that it sees itself.

    Attributes:
        repository: Model repository.
        root: Whether the user is root.
        slots: Processes that mpirun starts without being told to oversubscribe; None for enough.
        devices: GPUs it may use, by the driver's numbers; empty for all that it sees.
        server: Program; None for where the containers have it.
        traces: URL of an OTLP/HTTP receiver of spans; None for no spans.
        group: Machines that share the ranks; None for this one alone.
    """

    repository: str = f"{CONTAINER_ROOT}/{REPOSITORY}"
    root: bool = False
    slots: int | None = None
    devices: tuple[int, ...] = ()
    server: str | None = None
    traces: str | None = None
    group: HostGroup | None = None


def plan_launch(deployment: Deployment, start: Start, place: GpuPlace = GpuPlace()) -> Launch:
    """Work out how a deployment is started. Pure.

    Raises:
        InvalidInput: The deployment cannot be started at all; the text has all that is wrong with it.
    """
    faults = launch_faults(deployment, place.group)
    if faults:
        raise InvalidInput(f"{deployment.name}: how it is started", faults)
    assert deployment.requirements is not None, "checked above"
    facts = launch_facts(deployment.requirements.tensorrt_llm)
    spec = deployment.launch
    blocks = [_block(facts, deployment, start, place, rank) for rank in range(_ranks(spec))]
    values = _values(start, place)
    environment = {name: template.format(**values) for name, template in facts.environment.items()}
    if spec.mode == "orchestrator":
        environment |= facts.orchestrator_environment
    if place.group is not None:
        files = {"hostfile": place.group.hostfile, "ssh_config": place.group.ssh_config}
        environment |= {name: value.format(**files) for name, value in facts.group_environment.items()}
    if place.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.devices))
    server = place.server or facts.server
    before = blocks[0][: blocks[0].index(server)]
    command = tuple(blocks[0])
    if _needs_mpirun(spec):
        # Workers that are spawned take slots, too.
        spawned = spec.workers if spec.mode == "orchestrator" else 0
        command = _mpirun(facts, place, blocks, spawned=spawned)
    return Launch(
        command=command,
        environment=environment,
        ranks=len(blocks),
        programs=(
            *((facts.mpirun,) if _needs_mpirun(spec) else ()),
            *before,
            server,
            *((facts.worker,) if spec.mode == "orchestrator" else ()),
        ),
        shm_mib=facts.shm_mib(spec.workers if place.group is None else place.group.slots, spec.shm_mib),
        gave_up=facts.gave_up,
    )


def gpu_launch(
    deployment: Deployment, package: Path, start: Start, *, place: GpuPlace = GpuPlace()
) -> Launch:
    """Make the command of a server's processes on this machine, or in the container that this runs in.

    The repository is mirrored, unless the package lies where its own paths say.

    Args:
        place: Devices, program, receiver of spans and group; the rest of it is taken from this machine.

    Raises:
        InvalidInput: The deployment's launch section is impossible.
    """
    package = package.absolute()
    in_place = package == Path(CONTAINER_ROOT)
    repository = place.repository if in_place else str(start.stage / "repository")
    place = replace(place, repository=repository, root=os.geteuid() == 0, slots=mpi_slots())
    plan = plan_launch(deployment, start, place)

    def prepare() -> None:
        check_models(package / REPOSITORY, deployment.models)
        if not in_place:
            mirror(package / REPOSITORY, Path(repository), root=(CONTAINER_ROOT, package))

    return replace(
        plan,
        environment={**plan.environment, "PYTHONUNBUFFERED": "1"},
        prepare=prepare,
        synonyms={repository: str(package / REPOSITORY)},
    )


def launch_faults(deployment: Deployment, machines: HostGroup | None = None) -> list[Fault]:
    """List all that makes a deployment's launch section impossible, on one machine or over those of a group."""
    if deployment.requirements is None:
        return [Fault("there are none: it is not for a GPU", where=FILE, key="requirements")]
    spec = deployment.launch
    facts = launch_facts(deployment.requirements.tensorrt_llm)
    faults = []

    def fault(key: str, value: object, problem: str, fix: str = "") -> None:
        faults.append(Fault(problem, where=FILE, key=f"launch.{key}", value=value, fix=fix))

    unknown = sorted(({*spec.engine_models, *spec.gpu_device_ids}) - set(deployment.models))
    if unknown:
        fault("engine_models", ", ".join(unknown), f"not among the models {', '.join(deployment.models)}")
    if not spec.engine_models:
        fault("engine_models", None, "at least one model holds an engine")
    if spec.mode == "single" and spec.workers > 1:
        fault("mode", spec.mode, f"{spec.workers} ranks need leader, orchestrator or llmapi")
    if spec.mode == "leader" and spec.instances > 1:
        fault("mode", spec.mode, f"{spec.instances} instances of one model need orchestrator")
    if spec.mode == "orchestrator" and spec.workers > 1 and not spec.gpu_device_ids:
        fault("gpu_device_ids", None, "orchestrator needs the GPUs of each instance of each model")
    if spec.mode == "llmapi" and spec.instances > 1 and not facts.llmapi_instances:
        version = deployment.requirements.tensorrt_llm
        fault("gpu_device_ids", spec.instances, f"llmapi of TensorRT-LLM {version} has one instance")
    if machines is not None:
        if not _needs_mpirun(spec) or spec.mode == "orchestrator":
            fault(
                "mode",
                spec.mode,
                "its workers are started on one machine, and cannot be spread over several",
                "a machine with all of its GPUs, or a recipe without a draft (--set draft=null) and with one instance",
            )
        elif spec.world_size != len(machines.hosts) * machines.slots:
            offered = f"{len(machines.hosts)} machines with {machines.slots} GPUs each"
            fault("world_size", spec.world_size, f"there are {offered}: as many GPUs as ranks are needed")
    widest = max((len(group) for groups in spec.gpu_device_ids.values() for group in groups), default=None)
    if widest not in (None, spec.world_size):
        fault("gpu_device_ids", widest, f"GPUs of an instance must be as many as its {spec.world_size} ranks")
    for model, groups in spec.gpu_device_ids.items():
        for group in groups:
            if len(set(group)) < len(group) or len(group) != len(groups[0]):
                fault(
                    f"gpu_device_ids.{model}",
                    list(group),
                    "each rank of each instance has one GPU of its own",
                )
            if any(not 0 <= gpu < deployment.requirements.gpus for gpu in group):
                fault(
                    f"gpu_device_ids.{model}",
                    list(group),
                    f"there are GPUs 0 to {deployment.requirements.gpus - 1}",
                )
    return faults


def _ranks(spec: LaunchSpec) -> int:
    return spec.world_size if _needs_mpirun(spec) and spec.mode != "orchestrator" else 1


def _needs_mpirun(spec: LaunchSpec) -> bool:
    """Whether there are several ranks, or one that spawns others: mpirun ends only what it has started."""
    match spec.mode:
        case "single":
            return False
        case "leader" | "orchestrator":
            return True
        case "llmapi":
            return spec.mpi and spec.world_size > 1 and spec.instances == 1


def _mpirun(
    facts: LaunchFacts, place: GpuPlace, blocks: Sequence[Sequence[str]], *, spawned: int
) -> tuple[str, ...]:
    command = [facts.mpirun]
    if place.root:
        command.append(facts.as_root)
    if place.group is not None:
        # Ranks that share a layer share a machine: one machine is filled after the other.
        command += facts.by_slot
    elif place.slots is not None and place.slots < len(blocks) + spawned:
        command.append(facts.oversubscribe)
    command += facts.unbound
    for rank, block in enumerate(blocks):
        command += [facts.separator] if rank else []
        command += [*facts.block, *block]
    return tuple(command)


def _block(facts: LaunchFacts, deployment: Deployment, start: Start, place: GpuPlace, rank: int) -> list[str]:
    spec = deployment.launch
    wrapped = spec.mode == "llmapi" and _needs_mpirun(spec) and facts.llmapi_wrapper is not None
    block = [facts.llmapi_wrapper] if wrapped and facts.llmapi_wrapper else []
    block.append(place.server or facts.server)
    block += facts.every_rank
    if rank == 0:
        block += facts.all_models + facts.restricted
    else:
        block += [*facts.one_model, *(facts.load.format(model=model) for model in spec.engine_models)]
    if spec.mode == "orchestrator":
        assert deployment.requirements is not None, "there are facts"
        block += facts.orchestrator_arguments
        block += [
            facts.orchestrator_arguments_of_a_gpu.format(gpu=gpu)
            for gpu in range(deployment.requirements.gpus)
        ]
    values = _values(start, place) | {"shared_memory_prefix": f"{start.shared_memory_prefix}r{rank}-"}
    filled = [argument.format(**values) for argument in block]
    if rank > 0:
        return [*filled, *facts.silent]
    return [*filled, *start.listeners.options, *(tracing(place.traces) if place.traces else ())]


def _values(start: Start, place: GpuPlace) -> dict[str, object]:
    return {
        "repository": place.repository,
        "stub_timeout_s": round(start.deadline_s),
        "drain_s": start.drain_s,
        "grpc_url": start.listeners.grpc_url,
    }
