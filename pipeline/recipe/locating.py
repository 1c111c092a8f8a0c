"""From problems of a loaded recipe to faults: where in its file, or on the command line, each key was given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import Fault
from pipeline.recipe.document import Document
from pipeline.recipe.faults import fault_of
from pipeline.recipe.overrides import apply_overrides
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.validator import Problem
from pipeline.recipe.yaml_reader import read_document


def located(recipe: Recipe, problems: Sequence[Problem]) -> list[Fault]:
    """The problems as faults, in the order of the file. A recipe that was made in Python has no lines."""
    document = _document(recipe)
    if document is None:
        values = recipe.model_dump(mode="json")
        return [
            Fault(
                problem.text,
                key=problem.keys[0],
                value=_value(values, problem.keys[0]),
                fix=problem.fix,
                rule=problem.rule,
            )
            for problem in problems
        ]
    faults = [fault_of(problem, document) for problem in problems]
    return sorted(faults, key=lambda fault: (fault.where == "--set", fault.line or 0))


def shown(file: Path) -> str:
    """A file as people write it: from the folder that they are in, if it lies there."""
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)


def _document(recipe: Recipe) -> Document | None:
    file = recipe.provenance.file
    if file is None:
        return None
    try:
        document = read_document(file.read_bytes(), shown(file))
    except OSError:
        return None
    apply_overrides(document, recipe.provenance.overrides)
    return document


def _value(values: object, key: str) -> object:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
