"""The GPUs of this machine, by NVML (nvidia-ml-py) or by `nvidia-smi`, and how they reach each other.

NVML is asked by a process of its own (`nvml.py`), because a call that hangs in the driver cannot be called off. The
topology is the matrix of `nvidia-smi topo -m`:

            GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
    GPU0     X      NV18    PXB     0-51            0
    GPU1    NV18     X      PXB     0-51            0
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import get_args

from pipeline.machine import nvml
from pipeline.machine.probe import CommandOutput, run_command
from pipeline.plan.machine_facts import GpuFacts, GpuLink
from pipeline.plan.machine_facts import Path as Way

_QUERY = "index,uuid,name,compute_cap,memory.total,memory.free,driver_version"
_DEADLINE_S = 30.0
_NO_PROGRAM = "there is no nvidia-smi: no driver, or a container that was started without --gpus"


@dataclass(frozen=True, slots=True)
class DetectedGpu:
    """One GPU."""

    index: int
    uuid: str
    name: str  # "NVIDIA H100 80GB HBM3"
    sm: int  # 90 for compute capability 9.0
    memory_mib: int
    free_mib: int
    driver: str  # "590.44.01"

    def facts(self) -> GpuFacts:
        """Facts that rules judge."""
        return GpuFacts(self.index, self.name, self.sm, self.memory_mib, self.free_mib, self.driver)

    @property
    def capability(self) -> str:
        """Compute capability, such as "9.0"."""
        return f"{self.sm // 10}.{self.sm % 10}"


@dataclass(frozen=True, slots=True)
class GpuSurvey:
    """All GPUs of the machine, and where the answer comes from."""

    gpus: tuple[DetectedGpu, ...]
    problem: str  # why there are none to see; empty if there are
    source: str  # "NVML" | "nvidia-smi" | "" where neither answers
    cuda: str | None = None  # newest CUDA that the driver supports: "13.0"; only NVML tells
    nvml_problem: str = ""  # why NVML was not asked, or knows nothing
    late: bool = False  # the driver took too long


def survey_gpus(deadline_s: float = _DEADLINE_S) -> GpuSurvey:
    """List all GPUs of the machine. Where NVML hangs, so does nvidia-smi: both wait for the driver."""
    start = time.monotonic()
    output = ask_nvml(deadline_s)
    if not output.problem:
        answer = json.loads(output.text)
        gpus = tuple(DetectedGpu(driver=answer["driver"], **entry) for entry in answer["gpus"])
        return GpuSurvey(gpus, "" if gpus else "NVML lists no GPU", "NVML", answer["cuda"])
    if output.late:
        return GpuSurvey((), f"the driver does not answer within {deadline_s:g} s", "", late=True)
    left_s = max(0.1, deadline_s - (time.monotonic() - start))
    return replace(_by_nvidia_smi(left_s), nvml_problem=output.problem)


def ask_nvml(deadline_s: float) -> CommandOutput:
    """Run `nvml.py`, and return its output."""
    if find_spec("pynvml") is None:
        return CommandOutput(problem="nvidia-ml-py is not installed")
    output = run_command([sys.executable, nvml.__file__], deadline_s)
    # Nobody asks which Python failed.
    return replace(output, problem=output.problem.rpartition("failed: ")[2])


def read_gpus(deadline_s: float = _DEADLINE_S) -> tuple[tuple[DetectedGpu, ...], str]:
    """List all GPUs of the machine by nvidia-smi, and the reason if there are none to see."""
    survey = _by_nvidia_smi(deadline_s)
    return survey.gpus, survey.problem


def _by_nvidia_smi(deadline_s: float) -> GpuSurvey:
    if shutil.which("nvidia-smi") is None:
        return GpuSurvey((), _NO_PROGRAM, "")
    output = run_command(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], deadline_s)
    if output.problem:
        return GpuSurvey((), output.problem, "", late=output.late)
    try:
        rows = csv.reader(output.lines, skipinitialspace=True)
        gpus = tuple(_gpu(row) for row in rows if row)
    except ValueError as error:
        return GpuSurvey((), f"nvidia-smi says what cannot be read ({error}): {output.text.strip()!r}", "")
    return GpuSurvey(gpus, "", "nvidia-smi") if gpus else GpuSurvey((), "nvidia-smi lists no GPU", "")


def _gpu(row: list[str]) -> DetectedGpu:
    index, uuid, name, capability, total, free, driver = (field.strip() for field in row)
    major, _, minor = capability.partition(".")
    return DetectedGpu(int(index), uuid, name, int(major) * 10 + int(minor), int(total), int(free), driver)


def visible(
    gpus: tuple[DetectedGpu, ...], devices: tuple[int, ...], environment: Mapping[str, str]
) -> tuple[DetectedGpu, ...]:
    """Select the GPUs that a process sees: the given devices, or those that CUDA_VISIBLE_DEVICES leaves."""
    if devices:
        return tuple(gpu for gpu in gpus if gpu.index in devices)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    return tuple(
        gpu for gpu in gpus for name in names if str(gpu.index) == name or gpu.uuid.startswith(f"{name}")
    )


def allowed_devices(environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Read the indexes in CUDA_VISIBLE_DEVICES; empty where it is not set, or names GPUs otherwise."""
    names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(map(int, names)) if all(name.isdecimal() for name in names) else ()


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # the heading is underlined, even in a pipe
_GPU = re.compile(r"GPU(\d+)")
_NVLINK = re.compile(r"NV(\d+)")


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two GPUs."""

    gpus: tuple[int, int]  # the lower index first
    way: Way
    lanes: int = 0  # NVLinks bonded; 0 where the way is not NV


@dataclass(frozen=True, slots=True)
class Topology:
    """The ways between all GPUs."""

    links: tuple[Link, ...] = ()
    problem: str = ""  # why they are not known

    def facts(self) -> dict[tuple[int, int], GpuLink]:
        """Facts that rules judge."""
        return {link.gpus: GpuLink(link.way, link.lanes) for link in self.links}


def read_topology(deadline_s: float = _DEADLINE_S) -> Topology:
    """Read the topology of this machine."""
    output = run_command(["nvidia-smi", "topo", "-m"], deadline_s)
    return Topology(problem=output.problem) if output.problem else parse(output.text)


def parse(text: str) -> Topology:
    """Parse the matrix that nvidia-smi prints; unknown ways are left out."""
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    heading = next((line for line in lines if _GPU.search(line)), None)
    if heading is None:
        return Topology(problem="nvidia-smi topo -m shows no GPU")
    columns = [int(number) for number in re.findall(r"\bGPU(\d+)\b", heading)]
    links: list[Link] = []
    for line in lines[lines.index(heading) + 1 :]:
        cells = line.split()
        row = _GPU.fullmatch(cells[0]) if cells else None
        if row is None:
            continue
        for column, cell in zip(columns, cells[1:], strict=False):  # NICs and affinities follow
            link = _link((int(row[1]), column), cell)
            if link is not None and int(row[1]) < column:
                links.append(link)
    return Topology(tuple(links))


def _link(gpus: tuple[int, int], cell: str) -> Link | None:
    nvlink = _NVLINK.fullmatch(cell)
    if nvlink is not None:
        return Link(gpus, "NV", int(nvlink[1]))
    return next((Link(gpus, way) for way in get_args(Way) if way == cell and way != "NV"), None)
