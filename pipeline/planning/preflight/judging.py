"""All findings about a recipe, its models, what will be written for it, and a machine, at once; and what to do of them.

Pure. The facts are those of `pipeline.contracts`; nothing is downloaded, and what is not known is not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pipeline.contracts.rules import rule, rules
from pipeline.errors import InvalidInput
from pipeline.planning.machine_facts import MachineFacts
from pipeline.planning.model_facts import ModelFacts, known_models
from pipeline.planning.preflight import (
    budgets,
    formats,
    releases,
    serving,
    sourcing,
    speculation,
    splitting,
    tokenizers,
)
from pipeline.planning.preflight import machine as of_machine
from pipeline.planning.preflight.emission import Emission
from pipeline.planning.preflight.finding import Check, Finding, Said
from pipeline.planning.preflight.subject import Subject, subject
from pipeline.recipe import Recipe
from pipeline.recipe.locating import located, shown
from pipeline.recipe.rule import Problem, Values

GROUPS: Mapping[str, ModuleType] = {
    "releases": releases,
    "formats": formats,
    "splitting": splitting,
    "speculation": speculation,
    "tokenizers": tokenizers,
    "budgets": budgets,
    "serving": serving,
    "machine": of_machine,
    "sourcing": sourcing,
}
CHECKS: Mapping[str, Check] = {
    name: check for group in GROUPS.values() for name, check in group.CHECKS.items()
}
_ECHO = "runtime.refuses"
_ORDER = {"error": 0, "warning": 1, "note": 2}


def findings(
    recipe: Recipe,
    models: Mapping[str, ModelFacts] | None = None,
    machine: MachineFacts | None = None,
    emitted: Emission | None = None,
) -> tuple[Finding, ...]:
    """Everything that is to be said, the gravest first.

    Args:
        models: role -> what is known of it; by default what is known offline.
        machine: where it is to be built or served; None judges no machine.
        emitted: what the runtime will write; None leaves those rules out.
    """
    looked_at = subject(recipe, known_models(recipe) if models is None else models, machine, emitted)
    values = Values(recipe.model_dump(mode="json"))
    found = [
        _finding(name, looked_at, said, values)
        for name in _holding(looked_at)
        for said in CHECKS[name](looked_at)
    ]
    return tuple(sorted(_without_echoes(found), key=lambda finding: _ORDER[finding.severity]))


def refuse(recipe: Recipe, found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings that do not refuse the recipe: warnings, notes, and errors that are allowed.

    Raises:
        InvalidInput: with every other error as a fault, at its line of the recipe.
    """
    stopping = [finding for finding in found if finding.stops]
    if stopping:
        problems = [Problem(one.keys, one.problem, one.fix, one.rule) for one in stopping]
        file = recipe.provenance.file
        raise InvalidInput(shown(file) if file else f"recipe {recipe.name}", located(recipe, problems))
    return found


def _without_echoes(found: list[Finding]) -> list[Finding]:
    """Without the runtime's own refusals of what another rule explains."""
    explained = {key for one in found if one.severity == "error" and one.rule != _ECHO for key in one.keys}
    return [one for one in found if one.rule != _ECHO or not explained & {*one.keys, "runtime.kind"}]


def _holding(looked_at: Subject) -> list[str]:
    runtime = looked_at.gpu_runtime
    version = runtime.version if runtime is not None and not looked_at.release_problem else None
    return [one.id for one in rules() if one.id in CHECKS and one.concerns(looked_at.kind, version)]


def _finding(name: str, looked_at: Subject, said: Said, values: Values) -> Finding:
    facts = rule(name)
    value: Any = values[said.keys[0]]
    return Finding(
        rule=name,
        severity=said.severity or facts.severity(looked_at.kind),
        keys=said.keys,
        value=value,
        problem=said.problem,
        reason=facts.reason,
        fix=said.fix,
        sources=said.sources or facts.sources,
    )
