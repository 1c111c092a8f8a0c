"""How fast a GPU is at its best: memory, arithmetic and links. What a roofline needs, from `data/gpu_rates.yaml`.

>>> rates("h100-sxm-80g").memory_gb_s
3350.0
>>> rates("h100-pcie-80g").link_gb_s(4)   # the bridge joins two; four talk over PCIe 5
64.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pipeline.contracts.gpus import gpu
from pipeline.errors import UserError
from pipeline.resources import parse_yaml

Arithmetic = Literal["bf16", "fp8", "int8", "fp4"]

# GB/s of 16 lanes in one direction, as the PCI-SIG rates them, by generation.
_PCIE_GB_S: Mapping[int, float] = {4: 32.0, 5: 64.0}


@dataclass(frozen=True, slots=True)
class Rates:
    """Peaks of one GPU."""

    gpu: str
    memory_gb_s: float
    tflops: Mapping[str, float]  # arithmetic -> dense 10^12 operations a second
    pcie: int  # generation, 16 lanes
    tdp_w: int
    nvlink_gb_s: float = 0.0  # one direction; 0: none
    nvlink_gpus: int = 1  # that NVLink joins
    unverified: tuple[str, ...] = ()  # fields that no source was at hand for
    sources: tuple[str, ...] = ()

    def link_gb_s(self, gpus: int) -> float:
        """What one GPU can send to its peers, when so many work together."""
        return self.nvlink_gb_s if gpus <= self.nvlink_gpus else _PCIE_GB_S[self.pcie]

    def has_nvlink(self, gpus: int) -> bool:
        """Whether so many can be joined without PCIe."""
        return self.nvlink_gb_s > 0 and gpus <= self.nvlink_gpus


def rates(name: str) -> Rates:
    """Of a GPU by its name in recipes.

    Raises:
        UserError: there is no such GPU, or its peak rates are not among the data.
    """
    known = gpu(name).name
    if known not in _all():
        raise UserError(
            f"GPU {known}: its peak rates are not known, so its speed cannot be computed; "
            "add it to contracts/data/gpu_rates.yaml"
        )
    return _all()[known]


def all_rates() -> tuple[Rates, ...]:
    """Of every GPU that is known."""
    return tuple(_all().values())


@cache
def _all() -> Mapping[str, Rates]:
    file = resources.files("pipeline.contracts") / "data" / "gpu_rates.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return {entry["gpu"]: _read(entry) for entry in data["rates"]}


def _read(entry: Mapping[str, Any]) -> Rates:
    return Rates(
        gpu=entry["gpu"],
        memory_gb_s=float(entry["memory_gb_s"]),
        tflops={name: float(value) for name, value in entry["tflops"].items()},
        pcie=entry["pcie"],
        tdp_w=entry["tdp_w"],
        nvlink_gb_s=float(entry.get("nvlink_gb_s", 0)),
        nvlink_gpus=entry.get("nvlink_gpus", 1),
        unverified=tuple(entry.get("unverified", ())),
        sources=tuple(entry["source"]),
    )
