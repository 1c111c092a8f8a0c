"""Output of trtllm-build: phases, warnings, memory, and the likely cause of a failure.

Warnings matter because the builder changes settings without failing, and says so in them only. Patterns and known
failures are data (`data/build_log.yaml`, `data/build_errors.yaml`, each with its source). Causes are likely, not
certain: the last lines are always shown beside them.

>>> [error.id for error in diagnose(["[TRT] [E] Error Code 2: OutOfMemory (no further information)"], exit_code=1)]
['gpu_memory']
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from pipeline.contracts import read_facts


@dataclass(slots=True)
class LogReader:
    """Takes the output line by line.

    >>> reader = LogReader()
    >>> reader.feed("[10/12/2024-15:46:23] [TRT-LLM] [I] Serializing engine to /o/rank1.engine...")
    'writing rank 1'
    >>> reader.feed("[10/12/2024-15:46:23] [TRT-LLM] [W] Overriding paged_state to False")
    >>> reader.warnings
    ['Overriding paged_state to False']
    """

    engines: int = 0  # ranks that are written
    peak_memory_mib: float | None = None  # of host memory, the largest that it reported
    warnings: list[str] = field(default_factory=list)  # each once

    def feed(self, line: str) -> str | None:
        """Take a line, and return what it says about progress, if anything."""
        patterns = _patterns()
        prefixed = patterns.prefix.match(line)
        text = prefixed["text"] if prefixed else line
        if prefixed and prefixed["severity"] == patterns.warning and text not in self.warnings:
            self.warnings.append(text)
        if patterns.engine_done.search(text):
            self.engines += 1
        elif match := patterns.peak_memory.search(text):
            self.peak_memory_mib = max(self.peak_memory_mib or 0.0, float(match[1]) + float(match[2]))
        for pattern, template in patterns.phases:
            if match := pattern.search(text):
                return template.format(*match.groups())
        return None


@dataclass(frozen=True, slots=True)
class _Patterns:
    prefix: re.Pattern[str]
    warning: str
    phases: tuple[tuple[re.Pattern[str], str], ...]
    engine_done: re.Pattern[str]
    peak_memory: re.Pattern[str]


@cache
def _patterns() -> _Patterns:
    data = read_facts("build_log.yaml")
    single = {name: re.compile(data[name]["pattern"]) for name in ("engine_done", "peak_memory")}
    return _Patterns(
        prefix=re.compile(data["prefix"]["pattern"]),
        warning=data["prefix"]["warning"],
        phases=tuple((re.compile(phase["pattern"]), phase["text"]) for phase in data["phases"]),
        **single,
    )


_SHOWN = 3  # causes; more would help nobody


@dataclass(frozen=True, slots=True)
class BuildError:
    """One known failure of trtllm-build."""

    id: str
    patterns: tuple[re.Pattern[str], ...]
    exit_codes: frozenset[int]  # that say it without a word
    cause: str
    fix: str
    drops_timing_cache: bool  # whether a build without the kept cache may go well

    def __str__(self) -> str:
        return f"{self.cause}: {self.fix}"


def diagnose(lines: Iterable[str], exit_code: int) -> tuple[BuildError, ...]:
    """Find known failures in the lines of a builder that failed, at most three; a killed one ends with 128 + signal."""
    causes: dict[str, BuildError] = {}
    stripped = [line.strip() for line in lines]
    for error in build_errors():
        if any(pattern.search(line) for pattern in error.patterns for line in stripped):
            causes[error.id] = error
    if not causes:  # a worker that is killed makes its parent fail with a text of its own
        causes = {error.id: error for error in build_errors() if exit_code in error.exit_codes}
    return tuple(causes.values())[:_SHOWN]


@cache
def build_errors() -> tuple[BuildError, ...]:
    """List all known failures, the likeliest cause first."""
    return tuple(
        BuildError(
            id=entry["id"],
            patterns=tuple(re.compile(pattern) for pattern in entry["patterns"]),
            exit_codes=frozenset(entry.get("exit", ())),
            cause=entry["cause"],
            fix=entry["fix"],
            drops_timing_cache=entry.get("drops_timing_cache", False),
        )
        for entry in read_facts("build_errors.yaml")["errors"]
    )
