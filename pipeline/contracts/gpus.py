"""GPUs, and which formats TensorRT-LLM can run on them.

The facts are data (`data/gpus.yaml`, each with its source). A GPU is added by adding data.

>>> gpu("h100-sxm-80g").sm
90
>>> [str(finding) for finding in support(gpu("a100-sxm-80g"), "fp8", "auto", "tensorrt")]
['a100-sxm-80g (compute capability 8.0): FP8 needs compute capability 8.9 or newer']
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

from pipeline.contracts.releases import Track
from pipeline.contracts.version_range import precedes
from pipeline.errors import UserError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One product."""

    name: str  # as recipes name it
    chip: str
    architecture: str
    sm: int  # compute capability times 10
    memory_gib: float  # as sold
    driver_mib: int  # as the driver reports it, which is what there is

    @property
    def capability(self) -> str:
        """Compute capability as people write it."""
        return f"{self.sm // 10}.{self.sm % 10}"

    @property
    def usable_gib(self) -> float:
        """What the driver reports; up to 7 percent less than is sold, because of ECC."""
        return self.driver_mib / 1024


@dataclass(frozen=True, slots=True)
class FormatIssue:
    """Why a combination cannot be had, or only perhaps."""

    rule: str  # its id in data/rules
    severity: Literal["error", "warning"]
    subject: str  # "gpu" | "weights" | "kv_cache"
    reason: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return self.reason


def gpus() -> tuple[Gpu, ...]:
    """All that are known, by generation."""
    return tuple(
        Gpu(
            name=entry["name"],
            chip=entry["chip"],
            architecture=entry["architecture"],
            sm=entry["sm"],
            memory_gib=float(entry["memory_gib"]),
            driver_mib=entry["driver_mib"],
        )
        for entry in _data()["gpus"]
    )


def gpu(name: str) -> Gpu:
    """A GPU by name. UserError if it is not known; the text names those that are near."""
    known = {one.name: one for one in gpus()}
    if name in known:
        return known[name]
    same_chip = [one for one in known if one.startswith(name.split("-")[0] + "-")]
    near = same_chip or difflib.get_close_matches(name, known, n=4, cutoff=0.5) or list(known)
    raise UserError(f"GPU {name} is not known; known: {', '.join(near)}")


def support(
    on: Gpu, weights: str, kv_cache: str, track: Track, version: str | None = None
) -> tuple[FormatIssue, ...]:
    """What speaks against formats of weights and KV cache on a GPU, and against the GPU in a release if one is given.

    `weights` and `kv_cache` are the recipe's words (quantization.format, quantization.kv_cache); a combination that
    nothing speaks against has no findings.
    """
    return (
        *(_too_old(on, version) if version is not None else ()),
        *_findings("formats", "weights", weights, on, track),
        *_findings("kv_caches", "kv_cache", kv_cache, on, track),
    )


def _too_old(on: Gpu, version: str) -> Iterator[FormatIssue]:
    for entry in _data()["capabilities"]:
        if entry["sm"] == on.sm and precedes(version, entry["since"]):
            reason = f"{on.name} (compute capability {on.capability}): {entry['reason']}"
            yield FormatIssue("gpu.since", "error", "gpu", reason, tuple(entry["source"]))


def _findings(table: str, subject: str, chosen: str, on: Gpu, track: Track) -> Iterator[FormatIssue]:
    for entry in _data()[table]:
        if entry["format"] != chosen or track not in entry.get("tracks", (track,)):
            continue
        if not any(low <= on.sm <= high for low, high in entry["sm"]):
            reason = f"{on.name} (compute capability {on.capability}): {entry['reason']}"
            yield FormatIssue(
                entry["rule"], entry.get("severity", "error"), subject, reason, tuple(entry["source"])
            )


@cache
def _data() -> Mapping[str, Any]:
    file = resources.files("pipeline.contracts") / "data" / "gpus.yaml"
    data: Mapping[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return data


Arithmetic = Literal["bf16", "fp8", "int8", "fp4"]

# GB/s of 16 lanes in one direction, as the PCI-SIG rates them, by generation.
_PCIE_GB_S: Mapping[int, float] = {4: 32.0, 5: 64.0}


@dataclass(frozen=True, slots=True)
class GpuRates:
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


def gpu_rates(name: str) -> GpuRates:
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


def all_rates() -> tuple[GpuRates, ...]:
    """Of every GPU that is known."""
    return tuple(_all().values())


@cache
def _all() -> Mapping[str, GpuRates]:
    file = resources.files("pipeline.contracts") / "data" / "gpu_rates.yaml"
    data: Mapping[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return {entry["gpu"]: _read(entry) for entry in data["rates"]}


def _read(entry: Mapping[str, Any]) -> GpuRates:
    return GpuRates(
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
