"""Triton with TensorRT-LLM: the command that starts it, and its processes in the container that this runs in.

`plan_launch` is pure: from a deployment and the place it runs at to a command. Modes are those of `LaunchSpec`; what
each is made of are facts of `pipeline.contracts.launching`. Whether the machine fits is decided in `preflight`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.contracts.launching import LaunchFacts, launch_facts, tracing
from pipeline.errors import Fault, InvalidInput
from pipeline.machine.host import mpi_slots
from pipeline.serving.launch import HostGroup, Start, check_models, mirror
from pipeline.serving.ports import Listeners, Ports
from pipeline.triton.deployment import CONTAINER_ROOT, FILE, REPOSITORY, Deployment, LaunchSpec

CHECKED = Listeners.at(Ports(None, 8001, 8002))  # of a plan that is made to see whether there is one


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """Where a server is started; paths are those that it sees itself."""

    listeners: Listeners
    shared_memory_prefix: str  # unique to this start; all its regions in /dev/shm begin with it
    repository: str = f"{CONTAINER_ROOT}/{REPOSITORY}"
    root: bool = False  # whether the user is root
    slots: int | None = None  # processes that mpirun starts without being told to oversubscribe; None: enough
    devices: tuple[int, ...] = ()  # GPUs it may use, by the driver's numbers; empty: all that it sees
    server: str | None = None  # the program, where it does not lie as in the containers
    drain_s: int = 30  # requests in flight have this long to finish when the server is told to stop
    stub_timeout_s: int = 300  # the processes of Python models have this long to begin
    traces: str | None = None  # where an OTLP/HTTP receiver takes spans; None: none are exported
    group: HostGroup | None = None  # machines that share the ranks; None: this one has all


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A command, and what it needs around it."""

    command: tuple[str, ...]
    environment: Mapping[str, str]  # besides what is set already
    ranks: int  # servers that the command starts
    shm_mib: int  # shared memory that those of one machine need
    programs: tuple[str, ...]  # that the command runs
    gave_up: tuple[str, ...] = field(default=(), repr=False)  # in the log: it will not become ready any more


def plan_launch(deployment: Deployment, place: LaunchContext) -> LaunchPlan:
    """Work out how a deployment is started.

    Args:
        deployment: What the package's deployment.json says.
        place: Addresses, paths and user of the server.

    Returns:
        The command with its environment, and what it needs of the machine.

    Raises:
        InvalidInput: the deployment cannot be started at all; the text says all that is wrong with it.
        UserError: its version of TensorRT-LLM is not known.
    """
    faults = launch_faults(deployment, place.group)
    if faults:
        raise InvalidInput(f"{deployment.name}: how it is started", faults)
    assert deployment.requirements is not None, "checked above"
    facts = launch_facts(deployment.requirements.tensorrt_llm)
    spec = deployment.launch
    blocks = [_block(facts, deployment, place, rank) for rank in range(_ranks(spec))]
    environment = _filled_in(facts.environment, place)
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
        spawned = spec.workers if spec.mode == "orchestrator" else 0  # they take slots, too
        command = _mpirun(facts, place, blocks, spawned=spawned)
    return LaunchPlan(
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


def launch_faults(deployment: Deployment, machines: HostGroup | None = None) -> list[Fault]:
    """All that makes a deployment's launch section impossible, on one machine or over those of a group."""
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
    """One rank needs none, except where it is to spawn others: what mpirun did not start, it does not end either."""
    match spec.mode:
        case "single":
            return False
        case "leader" | "orchestrator":
            return True
        case "llmapi":
            return spec.mpi and spec.world_size > 1 and spec.instances == 1


def _mpirun(
    facts: LaunchFacts, place: LaunchContext, blocks: Sequence[Sequence[str]], *, spawned: int
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


def _block(facts: LaunchFacts, deployment: Deployment, place: LaunchContext, rank: int) -> list[str]:
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
    values = _values(place) | {"shared_memory_prefix": f"{place.shared_memory_prefix}r{rank}-"}
    filled = [argument.format(**values) for argument in block]
    if rank > 0:
        return [*filled, *facts.silent]
    return [*filled, *place.listeners.options, *(tracing(place.traces) if place.traces else ())]


def _values(place: LaunchContext) -> dict[str, object]:
    return {
        "repository": place.repository,
        "stub_timeout_s": place.stub_timeout_s,
        "drain_s": place.drain_s,
        "grpc_url": place.listeners.grpc_url,
    }


def _filled_in(templates: Mapping[str, str], place: LaunchContext) -> dict[str, str]:
    return {name: template.format(**_values(place)) for name, template in templates.items()}


@dataclass(frozen=True, slots=True)
class NativeLauncher:
    """See `pipeline.serving.launch.Launcher`."""

    deployment: Deployment
    package: Path
    devices: tuple[int, ...] = ()  # GPUs it may use; empty: all
    server: str | None = None  # None: where the containers have it
    traces: str | None = None  # where an OTLP/HTTP receiver takes spans; None: none are exported
    group: HostGroup | None = None  # machines that share the ranks; None: this one has all

    local = True
    attempts = 1  # what takes minutes to load is not loaded twice without being asked
    noise = ()

    def check(self) -> None:
        """Raises InvalidInput: its launch section is impossible, or the repository holds other models than it says."""
        check_models(self.package / REPOSITORY, self.deployment.models)
        plan_launch(self.deployment, LaunchContext(CHECKED, "check-", group=self.group))

    def launch(self, start: Start) -> NativeLaunch:
        place = native_place(start, devices=self.devices, server=self.server)
        place = replace(place, traces=self.traces, group=self.group)
        if self.package.absolute() != Path(CONTAINER_ROOT):
            place = replace(place, repository=str(start.stage / "repository"))
        return NativeLaunch(plan_launch(self.deployment, place), place.repository, self.package, start)


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """See `pipeline.serving.launch.Launch`."""

    plan: LaunchPlan
    repository: str  # as the server sees it
    package: Path
    start: Start

    cleanup = ()

    @property
    def command(self) -> tuple[str, ...]:
        return self.plan.command

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.plan.environment, "PYTHONUNBUFFERED": "1"}

    @property
    def gave_up(self) -> tuple[str, ...]:
        return self.plan.gave_up

    @property
    def synonyms(self) -> dict[str, str]:
        return {self.repository: str(self.package / REPOSITORY)}

    def prepare(self) -> None:
        """Mirror the repository, unless the package lies where its own paths say that it does."""
        if self.package.absolute() != Path(CONTAINER_ROOT):
            source = self.package.absolute() / REPOSITORY
            mirror(source, Path(self.repository), root=(CONTAINER_ROOT, self.package.absolute()))


def native_place(start: Start, *, devices: tuple[int, ...] = (), server: str | None = None) -> LaunchContext:
    """This machine, for a package at CONTAINER_ROOT."""
    return LaunchContext(
        listeners=start.listeners,
        shared_memory_prefix=start.shared_memory_prefix,
        root=os.geteuid() == 0,
        slots=mpi_slots(),
        devices=devices,
        server=server,
        drain_s=start.drain_s,
        stub_timeout_s=round(start.deadline_s),
    )
