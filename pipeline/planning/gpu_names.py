"""From a GPU as its driver names it to its name in recipes."""

from __future__ import annotations

import re
from typing import Protocol

from pipeline.contracts.gpus import Gpu, gpus


class Seen(Protocol):
    """What a driver reports."""

    @property
    def name(self) -> str: ...
    @property
    def sm(self) -> int: ...
    @property
    def memory_mib(self) -> int: ...


def contract_name(seen: Seen) -> str | None:
    """The GPU's name in the contracts: same compute capability, its chip in the driver's name, nearest memory."""
    pcie = "pcie" in _words(seen.name)
    fitting = [known for known in gpus() if known.sm == seen.sm and is_chip(seen, known)]
    nearest = min(
        fitting,
        key=lambda known: (abs(known.driver_mib - seen.memory_mib), pcie != ("pcie" in _words(known.name))),
        default=None,
    )
    return nearest.name if nearest else None


def is_chip(seen: Seen, known: Gpu) -> bool:
    """Whether the driver's name has all words of the chip's."""
    return set(_words(known.chip)) <= set(_words(seen.name))


def _words(name: str) -> list[str]:
    return re.split(r"[\s-]+", name.lower())
