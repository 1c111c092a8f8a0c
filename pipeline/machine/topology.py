"""How the GPUs of this machine reach each other: the matrix of `nvidia-smi topo -m`.

        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      NV18    PXB     0-51            0
GPU1    NV18     X      PXB     0-51            0
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from pipeline.machine.asking import ask
from pipeline.planning.machine_facts import GpuLink
from pipeline.planning.machine_facts import Path as Way

_DEADLINE_S = 30.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # the heading is underlined, even in a pipe
_GPU = re.compile(r"GPU(\d+)")
_NVLINK = re.compile(r"NV(\d+)")

Links = Mapping[tuple[int, int], GpuLink]


@dataclass(frozen=True, slots=True)
class Topology:
    """The ways between GPUs."""

    links: Links = field(default_factory=dict)  # (lower index, higher index) -> way
    problem: str = ""  # why they are not known


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
    links: dict[tuple[int, int], GpuLink] = {}
    for line in lines[lines.index(heading) + 1 :]:
        cells = line.split()
        row = _GPU.fullmatch(cells[0]) if cells else None
        if row is None:
            continue
        for column, cell in zip(columns, cells[1:], strict=False):  # NICs and affinities follow
            link = _link(cell)
            if link is not None and int(row[1]) < column:
                links[int(row[1]), column] = link
    return Topology(links)


def _link(cell: str) -> GpuLink | None:
    nvlink = _NVLINK.fullmatch(cell)
    if nvlink is not None:
        return GpuLink("NV", int(nvlink[1]))
    return next((GpuLink(way) for way in get_args(Way) if way == cell and way != "NV"), None)
