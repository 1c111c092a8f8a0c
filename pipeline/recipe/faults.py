"""Pydantic's errors in the words of the recipe file: place, key, value, what is wrong and what is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from pipeline.errors import Fault
from pipeline.recipe.document import Document, Path, dotted
from pipeline.recipe.explain import UNION, explain
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.section import Section
from pipeline.recipe.shape import field_at, without_tags
from pipeline.recipe.validator import Problem, Unsound, Values
from pipeline.recipe.validators import broken_rules


def faults_of(error: ValidationError, document: Document) -> list[Fault]:
    """Every fault of a document that did not validate, those of rules across fields included."""
    formless = {fault.key for fault in document.faults}  # they were read as null, and said so
    faults: list[Fault] = []
    wrong: list[Path] = []
    for detail in error.errors(include_url=False):
        if detail["type"] == "rule":
            context = detail["ctx"]
            faults.append(
                fault_of(
                    Problem(tuple(context["keys"]), context["problem"], context["fix"], context["rule"]),
                    document,
                )
            )
            continue
        wrong.append(without_tags(Recipe, detail["loc"]))
        if detail["input"] is not None or dotted(wrong[-1]) not in formless:
            faults.append(_fault(detail, document))
    if wrong:  # then pydantic did not get as far as the rules
        faults += [fault_of(problem, document) for problem in broken_rules(SoundValues(document.data, wrong))]
    return faults


class SoundValues(Values):
    """The values of a document, less those that are at fault."""

    def __init__(self, data: Mapping[str, Any], wrong: Sequence[Path]) -> None:
        super().__init__(data)
        self._wrong = wrong

    def __getitem__(self, key: str) -> Any:
        path: Path = tuple(key.split("."))
        if any(path[: len(wrong)] == wrong for wrong in self._wrong):
            raise Unsound(key)
        value = super().__getitem__(key)
        return self._default(path) if value is None else value

    def _default(self, path: Path) -> Any:
        value: Any = self._data
        for depth, part in enumerate(path):
            if value is None:
                return None
            if part in value:
                value = value[part]
                continue
            info = field_at(Recipe, self._data, path[: depth + 1])
            default = info.get_default(call_default_factory=True, validated_data={}) if info else None
            if default is PydanticUndefined:
                raise Unsound(".".join(map(str, path)))
            value = default.model_dump(mode="json") if isinstance(default, Section) else default
        return list(value) if isinstance(value, tuple) else value


def fault_of(problem: Problem, document: Document) -> Fault:
    """A problem at the place where its first key was given."""
    path, *others = [tuple(key.split(".")) for key in problem.keys]
    place = document.place(path)
    value = place.text if path in document.places else None
    overridden = [dotted(other) for other in others if document.place(other).where == "--set" != place.where]
    text = problem.text + (f" [{', '.join(overridden)} given by --set]" if overridden else "")
    return Fault(
        text,
        where=place.where,
        line=place.line,
        key=dotted(path),
        value=value or None,
        fix=problem.fix,
        rule=problem.rule,
    )


def _fault(error: ErrorDetails, document: Document) -> Fault:
    path = without_tags(Recipe, error["loc"])
    if error["type"] in UNION:
        path = (*path, error["ctx"]["discriminator"].strip("'"))
    problem, fix = explain(error, path, document.place(path).text, document.data)
    place = document.place(path)
    given = place.text if path in document.places and error["type"] != "missing" else None
    return Fault(problem, where=place.where, line=place.line, key=dotted(path), value=given or None, fix=fix)
