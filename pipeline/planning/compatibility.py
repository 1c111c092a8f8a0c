"""Whether what a recipe asks for exists: release, runtime, GPU, formats, speculation, and sizes that can be split.

Pure: a recipe and the sizes of its models in, everything that speaks against it out, all at once. The facts are those
of `pipeline.contracts`; nothing is downloaded, and no machine is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.contracts.compatibility import rule
from pipeline.contracts.models import ModelSizes
from pipeline.errors import InvalidInput
from pipeline.planning import compatibility_rules, own_rules, size_rules
from pipeline.planning.concern import Concern, Said
from pipeline.planning.subject import Subject, known_sizes, subject
from pipeline.recipe import Recipe
from pipeline.recipe.locating import located, shown
from pipeline.recipe.rule import Problem

CHECKS = {**compatibility_rules.CHECKS, **own_rules.CHECKS, **size_rules.CHECKS}
_ORDER = {"error": 0, "warning": 1, "note": 2}


def concerns(recipe: Recipe, sizes: Mapping[str, ModelSizes] | None = None) -> tuple[Concern, ...]:
    """All that speaks against a recipe, the gravest first.

    `sizes` (role -> sizes) defaults to what is known offline; a rule that needs other sizes is left out.
    """
    looked_at = subject(recipe, known_sizes(recipe) if sizes is None else sizes)
    found = [
        _concern(name, looked_at, said) for name in _holding(looked_at) for said in CHECKS[name](looked_at)
    ]
    return tuple(sorted(found, key=lambda concern: _ORDER[concern.severity]))


def refuse_incompatible(recipe: Recipe, sizes: Mapping[str, ModelSizes] | None = None) -> tuple[Concern, ...]:
    """What is not grave enough to refuse a recipe.

    Raises:
        InvalidInput: with every error as a fault, at its line of the recipe.
    """
    found = concerns(recipe, sizes)
    errors = [concern for concern in found if concern.severity == "error"]
    if errors:
        problems = [Problem(concern.keys, concern.problem, concern.fix) for concern in errors]
        file = recipe.provenance.file
        raise InvalidInput(shown(file) if file else f"recipe {recipe.name}", located(recipe, problems))
    return tuple(concern for concern in found if concern.severity != "error")


def _holding(looked_at: Subject) -> list[str]:
    return [name for name in CHECKS if looked_at.kind in rule(name).runtimes]


def _concern(name: str, looked_at: Subject, said: Said) -> Concern:
    facts = rule(name)
    severity = said.severity or facts.severity(looked_at.kind)
    return Concern(name, severity, said.keys, said.problem, said.fix, said.sources or facts.sources)
