"""What a rule says, and a finding: what is known of it besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.contracts.rules import Severity
from pipeline.plan.preflight.context import Subject


@dataclass(frozen=True, slots=True)
class Said:
    """One objection of a check. Severity and sources are the rule's, unless given."""

    keys: tuple[str, ...]  # of the recipe, the one to change first
    problem: str
    fix: str = ""
    severity: Severity | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that speaks against a recipe, its models or a machine."""

    rule: str  # its id in contracts/data/rules
    severity: Severity
    keys: tuple[str, ...]  # of the recipe, the one to change first; or what of the machine: "machine.driver"
    value: object  # what the recipe says for the first of them; None: nothing
    problem: str
    reason: str  # why upstream, or we, have the rule
    fix: str
    sources: tuple[str, ...]
    allowed: bool = False  # an error that --allow lets pass

    @property
    def stops(self) -> bool:
        """Whether it refuses the recipe."""
        return self.severity == "error" and not self.allowed

    @property
    def mark(self) -> str:
        """How it is listed."""
        return "allowed" if self.allowed else self.severity

    def __str__(self) -> str:
        given = "" if self.value is None or isinstance(self.value, dict) else f" = {self.value}"
        text = f"{self.keys[0]}{given}: {self.problem}"
        return f"{text} ({self.fix})" if self.fix else text


Check = Callable[[Subject], Iterator[Said]]
