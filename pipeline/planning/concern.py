"""What a rule says, and a concern: what is known of it besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.contracts.compatibility import Severity
from pipeline.planning.subject import Subject


@dataclass(frozen=True, slots=True)
class Said:
    """One objection of a check. Severity and sources are the rule's, unless given."""

    keys: tuple[str, ...]  # of the recipe, the one to change first
    problem: str
    fix: str = ""
    severity: Severity | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Concern:
    """Something that speaks against a recipe."""

    rule: str  # its id in contracts/data/compatibility.yaml
    severity: Severity
    keys: tuple[str, ...]
    problem: str
    fix: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.keys[0]}: {self.problem}"
        return f"{text} ({self.fix})" if self.fix else text


Check = Callable[[Subject], Iterator[Said]]
