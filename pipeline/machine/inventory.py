"""Inventory of a machine: all probes run at the same time, within a deadline.

    inventory = take(store=Path("~/.cache/pipeline/store"), deadline_s=2.5)
    inventory.facts()  # what rules judge

A probe that is late leaves its part unknown, with the reason in `late`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import ServerError
from pipeline.machine.docker import Docker, read_docker
from pipeline.machine.gpus import GpuSurvey, Topology, read_topology, survey_gpus, visible
from pipeline.machine.host import (
    Disk,
    Memory,
    Processors,
    Ulimits,
    batch_system,
    read_disk,
    read_memory,
    read_processors,
    read_ulimits,
    shared_memory_bytes,
)
from pipeline.machine.network import Hub, HubFile, Listener, listeners, read_hub
from pipeline.machine.probe import ProbeTimeout, at_once
from pipeline.machine.programs import (
    EngineBuilder,
    Mpi,
    Software,
    TritonProgram,
    read_builder,
    read_mpi,
    read_triton,
    software_here,
)
from pipeline.plan.machine_facts import DiskFacts, DockerFacts, GpuFacts, MachineFacts

DEADLINE_S = 2.0
MARGIN = 0.8  # of the deadline that a program is given, so that its own reason is heard


@dataclass(frozen=True, slots=True)
class Inventory:
    """Answers of the probes; None: the probe did not answer in time (see `late`), or was not run."""

    gpus: GpuSurvey | None = None
    topology: Topology | None = None
    memory: Memory | None = None
    processors: Processors | None = None
    ulimits: Ulimits | None = None
    store: Disk | None = None
    temporary: Disk | None = None
    shm_bytes: int | None = None
    docker: Docker | None = None
    mpi: Mpi | None = None
    triton: TritonProgram | None = None
    software: Software | None = None  # of the Python on PATH
    builder: EngineBuilder | None = None
    hub: Hub | None = None
    listeners: Mapping[int, Listener] | None = None  # port -> who listens there
    late: Mapping[str, str] = field(default_factory=dict)  # probe -> why it has no answer

    def facts(self, devices: tuple[int, ...] = ()) -> MachineFacts:
        """Facts that rules judge. `devices`: GPUs that may be used; empty for all that CUDA_VISIBLE_DEVICES leaves."""
        return MachineFacts(
            gpus=self._gpus(devices),
            gpu_problem=self.gpus.problem if self.gpus else "",
            links=self.topology.facts() if self.topology and not self.topology.problem else None,
            store=_disk_facts(self.store),
            temporary=_disk_facts(self.temporary),
            memory_bytes=self.memory.total_bytes if self.memory else None,
            memory_available_bytes=self.memory.available_bytes if self.memory else None,
            shm_bytes=self.shm_bytes,
            memlock_bytes=self.ulimits.memlock_bytes if self.ulimits else None,
            memlock_limited=self.ulimits.memlock_bytes is not None if self.ulimits else None,
            batch_system=batch_system(),
            bf16=self.processors.bf16 if self.processors else None,
            mpi_slots=self.processors.cores if self.processors else None,
            is_root=os.geteuid() == 0,
            taken_ports=frozenset(self.listeners) if self.listeners is not None else None,
            docker=_docker_facts(self.docker),
            hub=self.hub.repositories if self.hub else {},
        )

    def _gpus(self, devices: tuple[int, ...]) -> tuple[GpuFacts, ...] | None:
        if self.gpus is None:
            return None
        return tuple(gpu.facts() for gpu in visible(self.gpus.gpus, devices, os.environ))


def take(
    store: Path | None = None,
    *,
    only: Collection[str] = (),
    ports: Iterable[int] = (),
    hub_files: Iterable[HubFile] = (),
    deadline_s: float = DEADLINE_S,
) -> Inventory:
    """Look at this machine.

    Args:
        store: Folder that artifacts go to; it need not exist. None: no store is looked at.
        only: Probes to run, by the names of the fields; empty for all.
        ports: Ports whose listeners are wanted.
        hub_files: Files of the Hub to ask for.
    """
    each_s = deadline_s * MARGIN
    probes: dict[str, Callable[[], Any]] = {
        "gpus": partial(survey_gpus, each_s),
        "topology": partial(read_topology, each_s),
        "memory": read_memory,
        "processors": read_processors,
        "ulimits": read_ulimits,
        "temporary": partial(read_disk, Path(tempfile.gettempdir())),
        "shm_bytes": shared_memory_bytes,
        "docker": partial(read_docker, each_s),
        "mpi": partial(read_mpi, each_s),
        "triton": read_triton,
        "software": partial(_software, each_s),
        "builder": partial(read_builder, each_s),
        "hub": partial(read_hub, tuple(hub_files), each_s),
        "listeners": partial(listeners, tuple(ports)),
    }
    if store is not None:
        probes["store"] = partial(read_disk, store)
    chosen = {name: probe for name, probe in probes.items() if not only or name in only}
    answers = at_once(chosen, deadline_s)
    late = {name: answer.reason for name, answer in answers.items() if isinstance(answer, ProbeTimeout)}
    return Inventory(**{name: answer for name, answer in answers.items() if name not in late}, late=late)


def _software(deadline_s: float) -> Software | ProbeTimeout:
    try:
        return software_here(deadline_s=deadline_s)
    except ServerError as error:
        return ProbeTimeout(str(error))


def _disk_facts(disk: Disk | None) -> DiskFacts | None:
    return None if disk is None or disk.problem else DiskFacts(disk.folder, disk.device, disk.free_bytes)


def _docker_facts(docker: Docker | None) -> DockerFacts | None:
    if docker is None:
        return None
    return DockerFacts(docker.version, docker.gpu_runtime, docker.problem, docker.fix)
