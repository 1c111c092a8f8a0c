"""The rules of preflight: where each holds, how grave it is, why, what helps, who says so, whether it may be allowed.

The facts are data (`data/rules/*.yaml`, one file a group); what a rule compares is in `pipeline.plan.preflight`,
under the same ids. A rule that is held where something is written has no check there, but `held` and `by`.

>>> rule("rt.spec_same_vocab").severity("pytorch")
'warning'
>>> similar_ids("tp.awq_blocks")
('tp.awq_block', 'sm.awq_blackwell')
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pipeline.contracts import read_facts, record
from pipeline.contracts.version_range import holds

Severity = Literal["error", "warning", "note"]
GROUPS = (
    "releases", "support", "formats", "splitting", "speculation", "tokenizers", "budgets", "memory", "serving",
    "sourcing", "adapters", "caching", "devices", "software", "host",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, as far as it is data."""

    id: str
    group: str  # the file, and the module with its check
    runtimes: tuple[str, ...]  # runtime.kind of recipes that it is about
    severities: Mapping[str, Severity]  # runtime.kind -> severity
    fields: tuple[str, ...]  # keys of the recipe that it is about, the one to change first
    when: str
    check: str
    reason: str
    fix: str  # in general; a finding says more
    sources: tuple[str, ...]  # names in data/rules/sources.yaml
    since: str | None = None  # first release of TensorRT-LLM that it is about; None: all
    until: str | None = None  # first release that it is not about any more
    confidence: str = "as the source says"
    never_allowed: str = ""  # why --allow does not take it; empty: it does
    differs: str = ""  # where ours is not upstream's rule, and why
    held: str = ""  # how it is true by construction; empty: it is checked
    by: str = ""  # file and function that hold it
    facts: Mapping[str, Any] = field(default_factory=dict)  # names and numbers of its own

    def severity(self, runtime: str) -> Severity:
        """Return how grave the rule is in a runtime that it is about."""
        return self.severities[runtime]

    def concerns(self, runtime: str, version: str | None) -> bool:
        """Whether it is about a runtime and a release of TensorRT-LLM; None: no release."""
        return runtime in self.runtimes and (version is None or holds(version, self.since, self.until))

    @property
    def gravest(self) -> Severity:
        """Gravest severity of all runtimes."""
        order: tuple[Severity, ...] = ("error", "warning", "note")
        return next(severity for severity in order if severity in self.severities.values())


def rule(name: str) -> Rule:
    """Look up a rule by its id. Raises KeyError."""
    return _rules()[name]


def rules() -> tuple[Rule, ...]:
    """List all rules, group by group."""
    return tuple(_rules().values())


def source(name: str) -> str:
    """Return the text that the name of a source stands for."""
    text: str = _file("sources")["sources"][name]
    return text


def similar_ids(name: str) -> tuple[str, ...]:
    """List at most three ids of rules that are like an id that does not exist."""
    known = _rules()
    same_end = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
    return tuple(same_end or difflib.get_close_matches(name, known, n=3, cutoff=0.5))[:3]


@cache
def _rules() -> Mapping[str, Rule]:
    return {
        name: _rule(name, group, entry) for group in GROUPS for name, entry in _file(group)["rules"].items()
    }


def _rule(name: str, group: str, entry: Mapping[str, Any]) -> Rule:
    severity = entry["severity"]
    each = severity if isinstance(severity, Mapping) else dict.fromkeys(entry["runtimes"], severity)
    return record(Rule, {**entry, "id": name, "group": group, "severities": each, "sources": entry["source"]})


def _file(name: str) -> Mapping[str, Any]:
    return read_facts(f"rules/{name}.yaml")
