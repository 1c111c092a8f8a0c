"""Known failures of trtllm-build: the likely cause of a line that it prints, and what to do about it.

The facts are data (`data/build_errors.yaml`, each with its source). Causes are likely, not certain: the last lines are
always shown beside them.

>>> [error.id for error in diagnose(["[TRT] [E] Error Code 2: OutOfMemory (no further information)"], exit_code=1)]
['gpu_memory']
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from pipeline.resources import parse_yaml

_SHOWN = 3  # causes; more would help nobody


@dataclass(frozen=True, slots=True)
class BuildError:
    """One known failure."""

    id: str
    patterns: tuple[re.Pattern[str], ...]
    exit_codes: frozenset[int]  # that say it without a word
    cause: str
    fix: str
    drops_timing_cache: bool  # whether a build without the kept cache may go well
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.cause}: {self.fix}"


def build_errors() -> tuple[BuildError, ...]:
    """All that are known, the likeliest cause first."""
    return _errors()


def diagnose(lines: Iterable[str], exit_code: int) -> tuple[BuildError, ...]:
    """What the output of a builder that failed points to, at most three. `exit_code`: 128 + signal for a killed one."""
    found: dict[str, BuildError] = {}
    said = [line.strip() for line in lines]
    for error in _errors():
        if any(pattern.search(line) for pattern in error.patterns for line in said):
            found[error.id] = error
    if not found:  # a worker that is killed makes its parent fail with a text of its own
        found = {error.id: error for error in _errors() if exit_code in error.exit_codes}
    return tuple(found.values())[:_SHOWN]


@cache
def _errors() -> tuple[BuildError, ...]:
    file = resources.files("pipeline.contracts") / "data" / "build_errors.yaml"
    data: dict[str, Any] = parse_yaml(file.read_text("utf-8"))
    return tuple(
        BuildError(
            id=entry["id"],
            patterns=tuple(re.compile(pattern) for pattern in entry["patterns"]),
            exit_codes=frozenset(entry.get("exit", ())),
            cause=entry["cause"],
            fix=entry["fix"],
            drops_timing_cache=entry.get("drops_timing_cache", False),
            sources=tuple(entry["source"]),
        )
        for entry in data["errors"]
    )
