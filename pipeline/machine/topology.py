"""How the GPUs of this machine reach each other: the matrix of `nvidia-smi topo -m`.

        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      NV18    PXB     0-51            0
GPU1    NV18     X      PXB     0-51            0
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from pipeline.machine.probe import ask
from pipeline.plan.machine_facts import GpuLink
from pipeline.plan.machine_facts import Path as Way

_DEADLINE_S = 30.0
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
        """As rules look at them."""
        return {link.gpus: GpuLink(link.way, link.lanes) for link in self.links}


def read_topology(deadline_s: float = _DEADLINE_S) -> Topology:
    """That of this machine."""
    said = ask(["nvidia-smi", "topo", "-m"], deadline_s)
    return Topology(problem=said.problem) if said.problem else parse(said.text)


def parse(text: str) -> Topology:
    """The matrix, as nvidia-smi prints it; ways that it does not know are left out."""
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
