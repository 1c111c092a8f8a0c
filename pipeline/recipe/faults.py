"""Pydantic's errors in the words of the recipe file: place, key, value, what is wrong and what is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from pipeline.errors import Fault
from pipeline.recipe.document import Document, Path, dotted
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.rules import Problem, Unsound, Values, broken_rules
from pipeline.recipe.section import Section
from pipeline.recipe.shape import all_keys, field_at, members, section_at, tag, without_tags

_TYPES = {  # pydantic's error type -> what the value must be
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text",
    "tuple_type": "a list", "model_type": "a section of keys", "model_attributes_type": "a section of keys",
}  # fmt: skip
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def faults_of(error: ValidationError, document: Document) -> list[Fault]:
    """Every fault of a document that did not validate, those of rules across fields included."""
    details = error.errors(include_url=False)
    faults = [
        _rule(Problem(tuple(d["ctx"]["keys"]), d["ctx"]["problem"], d["ctx"]["fix"]), document)
        if d["type"] == "rule" else _fault(d, document)
        for d in details
    ]  # fmt: skip
    wrong = [without_tags(Recipe, d["loc"]) for d in details if d["type"] != "rule"]
    if wrong:  # then pydantic did not get as far as the rules
        faults += [_rule(problem, document) for problem in broken_rules(_SoundValues(document.data, wrong))]
    return faults


class _SoundValues(Values):
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
            if isinstance(value, Mapping) and part in value:
                value = value[str(part)]
                continue
            info = field_at(Recipe, self._data, path[: depth + 1])
            default = info.get_default(call_default_factory=True, validated_data={}) if info else None
            if default is PydanticUndefined:
                raise Unsound(".".join(map(str, path)))
            value = default.model_dump(mode="json") if isinstance(default, Section) else default
        return list(value) if isinstance(value, tuple) else value


def _rule(problem: Problem, document: Document) -> Fault:
    paths: list[Path] = [tuple(key.split(".")) for key in problem.keys]
    overridden = [path for path in paths if document.place(path).where != document.where]
    first = (overridden or paths)[0]
    place = document.place(first)
    own = document.places.get(paths[0])
    value = own.text if own else None
    return Fault(
        problem.text, where=place.where, line=place.line, key=problem.keys[0], value=value, fix=problem.fix
    )


def _fault(error: ErrorDetails, document: Document) -> Fault:
    path = without_tags(Recipe, error["loc"])
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path = (*path, error["ctx"]["discriminator"].strip("'"))
    problem, fix = _explain(error, path, document)
    place = document.place(path)
    given = place.text if path in document.places and error["type"] != "missing" else None
    return Fault(problem, where=place.where, line=place.line, key=dotted(path), value=given or None, fix=fix)


def _explain(error: ErrorDetails, path: Path, document: Document) -> tuple[str, str]:
    kind, context, data = error["type"], error.get("ctx", {}), document.data
    info = field_at(Recipe, data, path)
    if kind == "refused":
        return context["problem"], context["fix"]
    if kind == "missing":
        return "is missing", _example(info)
    if kind == "extra_forbidden":
        return "is not a key", _allowed(path, data)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        union = field_at(Recipe, data, path[:-1])
        tags = [tag(member)[1] for member in members(union.annotation)] if union else []
        return ("is missing" if kind == "union_tag_not_found" else "is not known"), _one_of(
            tags, error["input"]
        )
    if kind == "literal_error":
        return "is not known", _one_of(_literals(context["expected"]), error["input"])
    if kind in _BOUNDS and info is not None:
        return f"must be {_range(info)}", ""
    if kind in _TYPES:
        return _wrong_type(kind, error["input"], document.place(path).text, info)
    return f"is not accepted: {error['msg']}", ""


def _wrong_type(kind: str, value: Any, text: str | None, info: FieldInfo | None) -> tuple[str, str]:
    wanted = _TYPES[kind]
    if value is None:
        return (
            f"is empty; it must be {wanted}",
            "" if info is None or info.is_required() else "or leave the key out",
        )
    if kind == "string_type" and text is not None:
        return "must be text", f'write it in quotes: "{text}"'
    if kind == "bool_type" and str(value).lower() in ("on", "yes", "y", "1"):
        return "must be true or false", "write true"
    if kind == "bool_type" and str(value).lower() in ("off", "no", "n", "0"):
        return "must be true or false", "write false"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        bare = value.replace("_", "").replace(",", "").strip()
        if bare.isdecimal():
            return f"must be {wanted}", f"write {bare}, without quotes or separators"
    return f"must be {wanted}", _example(info)


def _range(info: FieldInfo) -> str:
    low: list[str] = []
    high: list[str] = []
    for bound in info.metadata:
        if isinstance(bound, Ge):
            low.append(f"{bound.ge}")
        if isinstance(bound, Gt):
            low.append(f"more than {bound.gt}")
        if isinstance(bound, Le):
            high.append(f"{bound.le}")
        if isinstance(bound, Lt):
            high.append(f"less than {bound.lt}")
    if low and high:
        return (
            f"{low[0]} to {high[0]}" if not low[0].startswith("more") else f"{low[0]} and at most {high[0]}"
        )
    return (
        low[0] if low and low[0].startswith("more") else f"at least {low[0]}" if low else f"at most {high[0]}"
    )


def _example(info: FieldInfo | None) -> str:
    return f"such as {info.examples[0]}" if info is not None and info.examples else ""


def _literals(expected: str) -> list[str]:
    return expected.replace(" or ", ", ").replace("'", "").split(", ")


def _one_of(allowed: Sequence[str], given: Any) -> str:
    near = get_close_matches(str(given).lower(), allowed, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}one of {', '.join(allowed)}"


def _allowed(path: Path, data: Mapping[str, Any]) -> str:
    key, section = str(path[-1]), section_at(Recipe, data, path[:-1])
    names = list(section.model_fields) if section else []
    near = get_close_matches(key, names, n=1)
    elsewhere = [known for known in all_keys(Recipe) if known.split(".")[-1] == key and known != dotted(path)]
    if not near and elsewhere:
        return f"did you mean {elsewhere[0]}? allowed here: {', '.join(names)}"
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}allowed: {', '.join(names)}"
