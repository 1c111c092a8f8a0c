"""Run all rules on a recipe, its models, what will be written for it, and a machine; sort what they find, and refuse.

Pure. The facts are those of `pipeline.contracts`; nothing is downloaded, and what is not known is not judged. Each
group of rules is a file of contracts/data/rules; RECIPE_GROUPS and MACHINE_GROUPS name the module with its checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.contracts.rules import Rule, Severity, rule, rules, similar_ids
from pipeline.errors import Fault, InvalidInput
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.model_facts import ModelFacts, offline_facts
from pipeline.plan.preflight import (
    budgets,
    formats,
    releases,
    serving,
    sourcing,
    speculation,
    splitting,
)
from pipeline.plan.preflight import machine as machines
from pipeline.plan.preflight.context import Check, Context, GeneratedConfig, Objection, make_context
from pipeline.plan.preflight.needs import MachineCheck, MachineNeeds, needs_of
from pipeline.recipe import Recipe
from pipeline.recipe.loading import located, shown
from pipeline.recipe.sections import RecipeValues
from pipeline.recipe.validators import Problem
from pipeline.store import Json
from pipeline.store.manifest import FINDINGS

# Group -> checks of a recipe, its models, and what will be written for it.
RECIPE_GROUPS: Mapping[str, Mapping[str, Check]] = {
    "releases": releases.RELEASE_CHECKS,
    "support": releases.SUPPORT_CHECKS,
    "formats": formats.FORMAT_CHECKS,
    "splitting": splitting.CHECKS,
    "speculation": speculation.SPECULATION_CHECKS,
    "tokenizers": speculation.TOKENIZER_CHECKS,
    "budgets": budgets.CHECKS,
    "memory": budgets.MEMORY_CHECKS,
    "serving": serving.CHECKS,
    "sourcing": sourcing.CHECKS,
    "adapters": sourcing.ADAPTER_CHECKS,
    "caching": serving.CACHE_CHECKS,
}
# Group -> checks of a machine, by what is needed of it.
MACHINE_GROUPS: Mapping[str, Mapping[str, MachineCheck]] = {
    "devices": machines.DEVICE_CHECKS,
    "software": machines.SOFTWARE_CHECKS,
    "host": machines.HOST_CHECKS,
}
RECIPE_CHECKS = {name: check for group in RECIPE_GROUPS.values() for name, check in group.items()}
MACHINE_CHECKS = {name: check for group in MACHINE_GROUPS.values() for name, check in group.items()}
CHECKED = frozenset(RECIPE_CHECKS) | frozenset(MACHINE_CHECKS)


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
        """How it is listed: its severity, or "allowed"."""
        return "allowed" if self.allowed else self.severity

    def __str__(self) -> str:
        value = "" if self.value is None or isinstance(self.value, dict) else f" = {self.value}"
        text = f"{self.keys[0]}{value}: {self.problem}"
        return f"{text} ({self.fix})" if self.fix else text


ALLOWABLE = frozenset(known.id for known in rules() if not known.never_allowed)


def check_allowed(names: Iterable[str]) -> frozenset[str]:
    """Check the ids of `--allow`.

    Args:
        names: Ids of rules, as the user gives them; one may come twice.

    Raises:
        InvalidInput: with every id that does not exist, or that the data forbids to allow.
    """
    wanted, known = frozenset(names), {each.id: each for each in rules()}
    faults: list[Fault] = []
    for name in sorted(wanted):
        if name not in known:
            near = ", ".join(similar_ids(name))
            fix = f"did you mean {near}?" if near else "pipeline rules lists them"
            faults.append(Fault("there is no such rule", key="--allow", value=name, fix=fix))
        elif known[name].never_allowed:
            faults.append(
                Fault(f"may not be allowed: {known[name].never_allowed}", key="--allow", value=name)
            )
    if faults:
        raise InvalidInput("--allow", faults)
    return wanted


def allow(findings: Sequence[Finding], allowed: frozenset[str]) -> tuple[Finding, ...]:
    """Mark the errors among findings that a user lets pass; rules that may never be allowed are not marked."""
    return tuple(
        replace(finding, allowed=True)
        if finding.severity == "error" and finding.rule in allowed & ALLOWABLE
        else finding
        for finding in findings
    )


def manifest_findings(findings: Sequence[Finding]) -> dict[str, Json]:
    """Records of warnings and allowed errors for the manifest of an engine or a package; empty if there are none."""
    records: list[Json] = [
        {"rule": finding.rule, "severity": finding.severity, "allowed": finding.allowed, "text": str(finding)}
        for finding in findings
        if finding.severity == "warning" or finding.allowed
    ]
    return {FINDINGS: records} if records else {}


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Write a line for each warning, and each error that was allowed, with the id of its rule at the end."""
    return [
        f"{finding.mark}: {finding} [{finding.rule}]"
        for finding in findings
        if finding.severity == "warning" or finding.allowed
    ]


_ECHO = "runtime.refuses"
_CLASS = ("model.class", "model.served")
_ORDER = {"error": 0, "warning": 1, "note": 2}


def findings(
    recipe: Recipe,
    models: Mapping[str, ModelFacts] | None = None,
    machine: MachineFacts | None = None,
    emitted: GeneratedConfig | None = None,
) -> tuple[Finding, ...]:
    """Run all rules on a recipe, and return what they find, the gravest first.

    Args:
        models: Role -> facts; by default those that are known offline.
        machine: Where it is to be built or served; None judges no machine.
        emitted: The runtime's settings; None leaves their rules out.
    """
    context = make_context(recipe, offline_facts(recipe) if models is None else models, machine, emitted)
    unsorted = [
        *_of_recipe(context),
        *(_of_machine(needs_of(context), machine) if machine is not None else ()),
    ]
    return _sorted(_without_echoes(unsorted))


def machine_findings(needs: MachineNeeds, machine: MachineFacts) -> tuple[Finding, ...]:
    """Run the rules of machines on needs alone, as of a package; return what they find, the gravest first."""
    return _sorted(_of_machine(needs, machine))


def refuse(recipe: Recipe, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Raise if a finding (after `allow`) refuses the recipe; else return the findings.

    Raises:
        InvalidInput: With every error that is not allowed as a fault, at its line of the recipe.
    """
    stopping = [finding for finding in findings if finding.stops]
    if stopping:
        problems = [Problem(finding.keys, finding.problem, finding.fix, finding.rule) for finding in stopping]
        file = recipe.provenance.file
        raise InvalidInput(shown(file) if file else f"recipe {recipe.name}", located(recipe, problems))
    return findings


def _of_recipe(context: Context) -> list[Finding]:
    """Findings of a recipe. A model whose class nothing here can run is refused for that alone, whatever its sizes."""
    recipe_findings = list(_checked(context))
    classes = [finding for finding in recipe_findings if finding.rule in _CLASS]
    if not classes:
        return recipe_findings
    judged = _checked(context.without_sizes({finding.keys[0] for finding in classes}))
    return [*classes, *(finding for finding in judged if finding.rule not in _CLASS)]


def _checked(context: Context) -> Iterator[Finding]:
    values = RecipeValues(context.recipe.model_dump(mode="json"))
    for checked in rules():
        if checked.id in RECIPE_CHECKS and checked.concerns(context.kind, context.version):
            for objection in RECIPE_CHECKS[checked.id](context):
                yield _finding(checked, context.kind, objection, values[objection.keys[0]])


def _of_machine(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Finding]:
    version = needs.serving.version if needs.serving is not None else None
    for name, check in MACHINE_CHECKS.items():
        if rule(name).concerns(needs.kind, version):
            for objection in check(needs, machine):
                yield _finding(rule(name), needs.kind, objection, needs.values.get(objection.keys[0]))


def _finding(checked: Rule, kind: str, objection: Objection, value: object) -> Finding:
    return Finding(
        rule=checked.id,
        severity=objection.severity or checked.severity(kind),
        keys=objection.keys,
        value=value,
        problem=objection.problem,
        reason=checked.reason,
        fix=objection.fix,
        sources=objection.sources or checked.sources,
    )


def _without_echoes(findings: list[Finding]) -> list[Finding]:
    """Drop refusals by the runtime that an error of another rule explains, if that error can never be allowed."""
    stopping = [
        finding
        for finding in findings
        if finding.severity == "error" and finding.rule != _ECHO and rule(finding.rule).never_allowed
    ]
    explained = {key for finding in stopping for key in finding.keys}
    problems = {finding.problem for finding in stopping}
    return [
        finding
        for finding in findings
        if finding.rule != _ECHO
        or not (finding.problem in problems or explained & {*finding.keys, "runtime.kind"})
    ]


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: _ORDER[finding.severity]))
