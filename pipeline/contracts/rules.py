"""Rules of upstream about recipes: where each holds, how grave it is, and who says so.

The facts are data (`data/rules/*.yaml`); what a rule compares is in `pipeline.planning.preflight`.

>>> rule("rt.spec_same_vocab").severity("pytorch")
'warning'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, as far as it is data."""

    id: str
    runtimes: tuple[str, ...]  # runtime.kind of recipes that it is about
    severities: Mapping[str, Severity]  # runtime.kind -> severity
    facts: Mapping[str, Any]  # names and numbers of its own
    sources: tuple[str, ...]
    reason: str = ""

    def severity(self, runtime: str) -> Severity:
        """How grave it is in a runtime that it is about."""
        return self.severities[runtime]


def rule(name: str) -> Rule:
    """A rule by its id."""
    return _rules()[name]


def rules() -> tuple[Rule, ...]:
    """All rules."""
    return tuple(_rules().values())


@cache
def _rules() -> Mapping[str, Rule]:
    file = resources.files("pipeline.contracts") / "data" / "rules" / "recipes.yaml"
    data = yaml.safe_load(file.read_text("utf-8"))
    return {name: _rule(name, entry) for name, entry in data["rules"].items()}


def _rule(name: str, entry: Mapping[str, Any]) -> Rule:
    given = entry["severity"]
    severities = given if isinstance(given, Mapping) else dict.fromkeys(entry["runtimes"], given)
    own = {key: value for key, value in entry.items() if key not in ("runtimes", "severity", "source")}
    return Rule(name, tuple(entry["runtimes"]), severities, own, tuple(entry["source"]))
