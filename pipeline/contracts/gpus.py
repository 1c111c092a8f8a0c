"""GPUs: their memory, how fast they are at their best, and which formats TensorRT-LLM can run on them.

The facts are data (`data/gpus.yaml`, each with its source; its header says how to add a GPU, which is one entry).

>>> gpu("h100-sxm-80g").sm
90
>>> gpu_rates("h100-pcie-80g").link_gb_s(4)   # the bridge joins two; four talk over PCIe 5
64.0
>>> gpu_rates("h100-sxm-80g").peer_gb_s(16)   # two machines, a network card of 400 Gb/s for each GPU
50.0
>>> [str(issue) for issue in format_issues(gpu("a100-sxm-80g"), "fp8", "auto", "tensorrt")]
['a100-sxm-80g (compute capability 8.0): FP8 needs compute capability 8.9 or newer']
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.contracts import read_facts, record
from pipeline.contracts.releases import Track
from pipeline.contracts.version_range import holds
from pipeline.errors import UserError

Arithmetic = Literal["bf16", "fp8", "int8", "fp4"]
_FILE = "contracts/data/gpus.yaml"
_MACHINE = 8  # GPUs of a machine, where NVLink joins no more


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
        """Compute capability as people write it: "9.0"."""
        return f"{self.sm // 10}.{self.sm % 10}"

    @property
    def usable_gib(self) -> float:
        """GiB that the driver reports: up to 7 percent less than is sold, because of ECC."""
        return self.driver_mib / 1024


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Peak rates of one GPU."""

    gpu: str
    memory_gb_s: float
    tflops: Mapping[str, float] = field(hash=False)  # arithmetic -> dense 10^12 operations a second
    pcie_gb_s: float  # 16 lanes, one direction
    nvlink_gb_s: float = 0.0  # one direction; 0: it has no NVLink
    nvlink_gpus: int = 1  # that NVLink joins
    network_gb_s: float = 50.0  # its network card, one direction
    tdp_w: float | None = None  # the highest that the product allows
    unverified: tuple[str, ...] = ()  # fields that no source was at hand for

    @property
    def machine_gpus(self) -> int:
        """GPUs that reach each other without a network."""
        return max(_MACHINE, self.nvlink_gpus)

    def machines(self, gpus: int) -> int:
        """Return how many machines so many GPUs are in; a rack that NVLink joins is one."""
        return -(-gpus // self.machine_gpus)

    def link_gb_s(self, gpus: int) -> float:
        """Return the GB/s that one of `gpus` GPUs can send to its peers in the same machine, in one direction."""
        return self.nvlink_gb_s if self.joined(gpus) else self.pcie_gb_s

    def joined(self, gpus: int) -> bool:
        """Tell whether NVLink joins those of `gpus` GPUs that are in the same machine."""
        return min(gpus, self.machine_gpus) <= self.nvlink_gpus

    def peer_gb_s(self, gpus: int) -> float:
        """Return the GB/s that one of `gpus` GPUs can send to whichever other, in one direction."""
        near = self.link_gb_s(gpus)
        return near if self.machines(gpus) == 1 else min(near, self.network_gb_s)


@dataclass(frozen=True, slots=True)
class GpuGeneration:
    """Facts about speed that the GPUs of one compute capability have in common."""

    sm: int
    constants: str  # family of `plan/performance/data/efficiency.yaml` whose constants hold
    links: Literal["nvlink", "pcie"]  # whose latency an exchange between GPUs has
    measured: bool = True  # False: the constants are those of a neighbour


@dataclass(frozen=True, slots=True)
class FormatIssue:
    """Why a format cannot run on a GPU, or only perhaps."""

    rule: str  # its id in data/rules
    severity: Literal["error", "warning"]
    subject: str  # "gpu" | "weights" | "kv_cache"
    reason: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return self.reason


def gpus() -> tuple[Gpu, ...]:
    """List all GPUs that are known, oldest architecture first."""
    return tuple(record(Gpu, entry) for entry in _data()["gpus"])


def gpu(name: str) -> Gpu:
    """Look a GPU up by its name in recipes.

    Raises:
        UserError: it is not known; the text names those that are near.
    """
    known = {entry["name"]: entry for entry in _data()["gpus"]}
    if name in known:
        return record(Gpu, known[name])
    same_chip = [other for other in known if other.startswith(name.split("-")[0] + "-")]
    near = same_chip or difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    listed = f"near: {', '.join(near)}" if near else f"known: {', '.join(known)}"
    raise UserError(f"GPU {name} is not known; {listed}")


def gpu_rates(name: str) -> GpuRates:
    """Look up the peak rates of a GPU by its name in recipes.

    Raises:
        UserError: there is no such GPU, its rates are not among the data, or those of its PCIe or network are not.
    """
    known = gpu(name).name
    entry = next(row for row in _data()["gpus"] if row["name"] == known)
    if "rates" not in entry:
        raise UserError(
            f"GPU {known}: its peak rates are not known, so its speed cannot be computed; "
            f"add them to its entry in {_FILE}"
        )
    facts = entry["rates"]
    rates: dict[str, float] = {}
    for way, spoken in (("pcie", "PCIe"), ("network", "network")):
        known_rates = _data()[f"{way}_gb_s"]
        if facts[way] not in known_rates:
            raise UserError(
                f"GPU {known}: the rate of {spoken} {facts[way]} is not known; add it to {way}_gb_s in {_FILE}"
            )
        rates[f"{way}_gb_s"] = known_rates[facts[way]]
    return record(GpuRates, {**facts, "gpu": known, **rates})


def gpu_generation(name: str) -> GpuGeneration:
    """Look up the generation of a GPU by its name in recipes.

    Raises:
        UserError: there is no such GPU, or its compute capability is not listed.
    """
    product = gpu(name)
    for entry in _data()["generations"]:
        if entry["sm"] == product.sm:
            return GpuGeneration(**entry)
    raise UserError(
        f"GPU {product.name}: compute capability {product.capability} is of no known generation, so its speed cannot "
        f"be computed; add it to generations in {_FILE}"
    )


def format_issues(
    on: Gpu, weights: str, kv_cache: str, track: Track, version: str | None = None
) -> tuple[FormatIssue, ...]:
    """List what speaks against formats of weights and KV cache on a GPU, in a release (None: that knows all)."""
    return (
        *(_too_old(on, version) if version is not None else ()),
        *_findings("formats", "weights", weights, on, track, version),
        *_findings("kv_caches", "kv_cache", kv_cache, on, track, version),
    )


def _too_old(on: Gpu, version: str) -> Iterator[FormatIssue]:
    for entry in _data()["capabilities"]:
        if entry["sm"] == on.sm and not holds(version, entry["since"], None):
            reason = f"{on.name} (compute capability {on.capability}): {entry['reason']}"
            yield FormatIssue("gpu.since", "error", "gpu", reason, tuple(entry["source"]))


def _findings(
    table: str, subject: str, chosen: str, on: Gpu, track: Track, version: str | None
) -> Iterator[FormatIssue]:
    for entry in _data()[table]:
        if entry["format"] != chosen or track not in entry.get("tracks", (track,)):
            continue
        since, until = entry.get("since"), entry.get("until")
        if until is not None if version is None else not holds(version, since, until):
            continue
        if not any(low <= on.sm <= high for low, high in entry["sm"]):
            reason = f"{on.name} (compute capability {on.capability}): {entry['reason']}"
            yield FormatIssue(
                entry["rule"], entry.get("severity", "error"), subject, reason, tuple(entry["source"])
            )


def _data() -> Mapping[str, Any]:
    return read_facts("gpus.yaml")
