"""Which product of the contracts a GPU is, by what its driver calls it."""

from __future__ import annotations

import re

from pipeline.contracts.gpus import Gpu, gpus
from pipeline.plan.machine_facts import GpuFacts


def contract_name(seen: GpuFacts) -> str | None:
    """The GPU's name in the contracts: same compute capability, its chip in the driver's name, nearest memory."""
    pcie = "pcie" in _words(seen.name)
    fitting = [known for known in gpus() if known.sm == seen.sm and is_chip(seen, known)]
    nearest = min(
        fitting,
        key=lambda known: (abs(known.driver_mib - seen.memory_mib), pcie != ("pcie" in _words(known.name))),
        default=None,
    )
    return nearest.name if nearest else None


def is_chip(seen: GpuFacts, known: Gpu) -> bool:
    """Whether the driver's name has all words of the chip's."""
    return set(_words(known.chip)) <= set(_words(seen.name))


def _words(name: str) -> list[str]:
    return re.split(r"[\s-]+", name.lower())
