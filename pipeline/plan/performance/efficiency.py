"""How much of a GPU's peaks an engine reaches, and what it spends besides: the constants of the model.

They are fitted (`scripts/fit_performance`) to the published figures that `data/published.yaml` marks for calibration,
and to nothing else; the file that they are read from says when, on how many figures, and with what error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pipeline.contracts.gpus import gpu
from pipeline.contracts.releases import Track
from pipeline.resources import parse_yaml

Family = Literal["ampere", "ada", "hopper", "blackwell", "rtx-blackwell"]
# The first compute capability (times 10) of each generation, oldest first.
_FAMILIES: Mapping[int, Family] = {
    80: "ampere", 89: "ada", 90: "hopper", 100: "blackwell", 120: "rtx-blackwell",
}  # fmt: skip
# Major versions of compute capabilities whose GPUs have been measured.
_MEASURED = (8, 9, 10, 12)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Of one GPU family and one backend. Shares are of the peak; times are seconds."""

    memory: float  # share of the memory bandwidth, weights and activations
    cache: float  # ... keys and values
    arithmetic: float  # share of the tensor cores' peak, matrix products
    attention: float  # ... attention over long prompts
    link: float  # share of one direction of the link between GPUs
    exchange_s: float  # an all-reduce, before its first byte
    layer_s: float  # kernels of one layer that move next to nothing
    step_s: float  # of the host for a step: scheduling, launching, sampling
    hides_step: bool  # whether that runs beside the step before, so that only what is longer shows
    sequence_s: float  # ... for each sequence in the step
    prompt_s: float  # once for a prompt, or for those that are done together
    overlap: float  # how sharply the slower of memory and arithmetic hides the other: 1 adds them, many hides


def family(name: str) -> Family:
    """The generation whose constants hold for a GPU: its own, else the newest that is older, else the oldest.

    Raises:
        UserError: the GPU is not known.
    """
    return list(_FAMILIES.values())[max(0, bisect_right(list(_FAMILIES), gpu(name).sm) - 1)]


def is_measured(name: str) -> bool:
    """Whether constants were fitted to GPUs of the same generation, and not only to its neighbours."""
    return gpu(name).sm // 10 in _MEASURED


def efficiency(name: str, track: Track, given: Mapping[str, Any] | None = None) -> Efficiency:
    """The constants for a GPU and a backend; `given` replaces the fitted ones (while they are being fitted)."""
    facts = fitted()["constants"] if given is None else given
    of_family, of_track = facts["families"][family(name)], facts["tracks"][track]
    link = facts["links"]["nvlink" if gpu(name).sm in _DATA_CENTER else "pcie"]
    return Efficiency(
        memory=of_family["memory"],
        cache=of_family["cache"],
        arithmetic=of_family["arithmetic"],
        attention=facts["shared"]["attention"],
        link=facts["shared"]["link"],
        exchange_s=link * 1e-6,
        layer_s=facts["shared"]["layer_us"] * 1e-6,
        step_s=facts["shared"]["step_us"] * 1e-6,
        hides_step=track == "pytorch",  # its overlap scheduler, on by default
        sequence_s=of_track["sequence_us"] * 1e-6,
        prompt_s=facts["shared"]["prompt_us"] * 1e-6,
        overlap=facts["shared"]["overlap"],
    )


_DATA_CENTER = (80, 90, 100, 103)


@cache
def fitted() -> Mapping[str, Any]:
    """The whole of `data/efficiency.yaml`."""
    file = resources.files("pipeline.plan.performance") / "data" / "efficiency.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data
