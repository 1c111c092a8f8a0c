"""Pydantic's errors in the words of the recipe file: place, key, value, what is wrong and what is right.

Three parts: faults of a document; what an error means; and what may stand at each key, read off the models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from pipeline.errors import Fault
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import RecipeSection
from pipeline.recipe.validators import InvalidValue, Problem, RecipeValues, broken_rules
from pipeline.recipe.yaml_reader import Document, KeyPath, dotted

_TYPES = {  # pydantic's error type -> what the value must be
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text",
    "tuple_type": "a list", "model_type": "a section of keys", "model_attributes_type": "a section of keys",
}  # fmt: skip
# Keys that recipes once had: what to do instead.
_REMOVED = {
    "cache.dynamic": "remove it: every answer lives for cache.ttl_s, and a request may ask for less by its own ttl_s",
    "cache.semantic.share_dynamic": "remove it; cache.semantic.tenants names those whose near questions share answers",
}
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
UNION = ("union_tag_not_found", "union_tag_invalid")


def faults_of(error: ValidationError, document: Document, most: int) -> tuple[list[Fault], int]:
    """Describe what is wrong with a document that did not validate, rules across fields included.

    Args:
        error: what pydantic says of the document's data.
        document: where each value was given.
        most: how many faults are described; describing one looks for near names.

    Returns:
        The faults, those that stand first in the file, and how many there are besides.
    """
    formless = {fault.key for fault in document.faults}  # they were read as null, and said so
    broken: list[Problem] = []
    wrong: list[tuple[KeyPath, ErrorDetails]] = []
    for detail in error.errors(include_url=False):
        if detail["type"] == "rule":
            context = detail["ctx"]
            broken.append(
                Problem(tuple(context["keys"]), context["problem"], context["fix"], context["rule"])
            )
        else:
            wrong.append((without_tags(Recipe, detail["loc"]), detail))
    if wrong:  # then pydantic did not get as far as the rules
        broken = broken_rules(ValidValues(document.data, [path for path, _ in wrong]))
    wrong = [one for one in wrong if one[1]["input"] is not None or dotted(one[0]) not in formless]
    wrong.sort(key=lambda one: document.place(one[0]).line or 0)
    faults = [_fault(path, detail, document) for path, detail in wrong[:most]]
    return [*faults, *(fault_of(problem, document) for problem in broken)], len(wrong) - len(faults)


class ValidValues(RecipeValues):
    """The values of a document, without those that are at fault: reading one raises InvalidValue."""

    def __init__(self, data: Mapping[str, Any], wrong: Sequence[KeyPath]) -> None:
        super().__init__(data)
        self._wrong = set(wrong)

    def __getitem__(self, key: str) -> Any:
        path: KeyPath = tuple(key.split("."))
        if any(path[:depth] in self._wrong for depth in range(len(path) + 1)):
            raise InvalidValue(key)
        value = super().__getitem__(key)
        return self._default(path) if value is None else value

    def _default(self, path: KeyPath) -> Any:
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
                raise InvalidValue(".".join(map(str, path)))
            value = default.model_dump(mode="json") if isinstance(default, RecipeSection) else default
        return list(value) if isinstance(value, tuple) else value


def fault_of(problem: Problem, document: Document) -> Fault:
    """Make the fault of a problem, at the place where its first key was given."""
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


def _fault(path: KeyPath, error: ErrorDetails, document: Document) -> Fault:
    if error["type"] in UNION:
        path = (*path, error["ctx"]["discriminator"].strip("'"))
    problem, fix = explain(error, path, document.place(path).text, document.data)
    place = document.place(path)
    given = place.text if path in document.places and error["type"] != "missing" else None
    return Fault(problem, where=place.where, line=place.line, key=dotted(path), value=given or None, fix=fix)


def explain(error: ErrorDetails, path: KeyPath, text: str | None, data: Mapping[str, Any]) -> tuple[str, str]:
    """Say in the words of a recipe what an error means.

    Args:
        error: one error of pydantic.
        path: the key that it is about.
        text: what was written there, of a scalar.
        data: the whole document.

    Returns:
        The problem, and what would be right ("" if nothing can be said).
    """
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    info = field_at(Recipe, data, path)
    if kind == "refused":
        return context["problem"], context["fix"]
    if kind == "missing":
        return "is missing", _example(info)
    if kind == "extra_forbidden" and dotted(path) in _REMOVED:
        return "is no key any more", _REMOVED[dotted(path)]
    if kind == "extra_forbidden":
        return "is not a key", _allowed(path, data)
    if kind in UNION:
        union = field_at(Recipe, data, path[:-1])
        tags = [tag(member)[1] for member in members(union.annotation)] if union else []
        return ("is missing", _one_of(tags)) if kind == UNION[0] else _unknown(tags, given.get(path[-1]))
    if kind == "literal_error":
        return _unknown(context["expected"].replace(" or ", ", ").replace("'", "").split(", "), given)
    if kind in _BOUNDS and info is not None:
        return f"must be {_range(info)}", ""
    if kind in _TYPES:
        return _wrong_type(kind, given, text, info)
    return f"is not accepted: {error['msg']}", ""


def _wrong_type(kind: str, value: Any, text: str | None, info: FieldInfo | None) -> tuple[str, str]:
    wanted = _TYPES[kind]
    if value is None:
        return (
            f"is empty; it must be {wanted}",
            "" if info is None or info.is_required() else "or leave the key out",
        )
    if kind == "string_type" and text is not None and not isinstance(value, list | dict):
        return "must be text", f'write it in quotes: "{text}"'
    if kind == "bool_type" and str(value).lower() in ("on", "yes", "y", "1"):
        return "must be true or false", "write true"
    if kind == "bool_type" and str(value).lower() in ("off", "no", "n", "0"):
        return "must be true or false", "write false"
    if kind in ("int_type", "float_type") and isinstance(value, str):
        bare = value.replace("_", "").replace(",", "").strip()
        if bare.isdecimal():
            return f"must be {wanted}", f"write {bare}, without quotes or separators"
    return f"must be {wanted}", _example(info) if kind == "string_type" else ""


def _range(info: FieldInfo) -> str:
    """
    >>> from pipeline.recipe.sections import Limits
    >>> _range(Limits.model_fields["max_concurrency"])
    '1 to 8192'
    """
    bounds = {type(bound): bound for bound in _metadata(info)}
    low, high = bounds.get(Ge), bounds.get(Le)
    if low and high:
        return f"{low.ge} to {high.le}"
    words = [
        f"{word} {getattr(bounds[kind], name)}"
        for kind, name, word in (
            (Ge, "ge", "at least"), (Gt, "gt", "more than"), (Le, "le", "at most"), (Lt, "lt", "less than"),
        )
        if kind in bounds
    ]  # fmt: skip
    return " and ".join(words)


def _metadata(info: FieldInfo) -> Iterator[Any]:
    """The bounds of a field, or of the items of its list."""
    yield from info.metadata
    parts = list(get_args(info.annotation))
    while parts:
        part = parts.pop()
        if isinstance(part, FieldInfo):
            yield from part.metadata
        else:
            parts += get_args(part)


def _example(info: FieldInfo | None) -> str:
    if info is None:
        return ""
    return f"such as {info.examples[0]}" if info.examples else _range(info)


def _unknown(allowed: Sequence[str], given: Any) -> tuple[str, str]:
    if given is None:
        return "is empty", _one_of(allowed)
    near = get_close_matches(str(given).lower(), allowed, n=1)
    return "is not known", (f"did you mean {near[0]}? " if near else "") + _one_of(allowed)


def _one_of(allowed: Sequence[str]) -> str:
    return f"one of {', '.join(allowed)}"


def _allowed(path: KeyPath, data: Mapping[str, Any]) -> str:
    key, section, holder = (
        str(path[-1]),
        section_at(Recipe, data, path[:-1]),
        field_at(Recipe, data, path[:-1]),
    )
    names = list(section.model_fields) if section else []
    near = get_close_matches(key, names, n=1)
    others = [member for member in members(holder.annotation) if key in member.model_fields] if holder else []
    elsewhere = [known for known in all_keys(Recipe) if known.split(".")[-1] == key and known != dotted(path)]
    if others:
        name, kinds = tag(others[0])[0], " or ".join(tag(member)[1] for member in others)
        hint = f"it belongs to {dotted((*path[:-1], name))} {kinds}; "
    elif near or elsewhere:
        hint = f"did you mean {(near or elsewhere)[0]}? "
    else:
        hint = ""
    return f"{hint}allowed{' here' if elsewhere and not near else ''}: {', '.join(names)}"


def members(annotation: Any) -> list[type[RecipeSection]]:
    """The sections that an annotation allows.

    >>> from pipeline.recipe.sections import Limits
    >>> [section.__name__ for section in members(Limits | None)]
    ['Limits']
    """
    if isinstance(annotation, type) and issubclass(annotation, RecipeSection):
        return [annotation]
    return [section for part in get_args(annotation) for section in members(part)]


def tag(section: type[RecipeSection]) -> tuple[str, str]:
    """The key and value that tell a member of a union, such as ("kind", "cpu")."""
    for name, info in section.model_fields.items():
        if get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1:
            return name, get_args(info.annotation)[0]
    raise TypeError(f"{section.__name__} has no tag")


def choose(info: FieldInfo, value: Any) -> type[RecipeSection] | None:
    """The section that `value` is meant as; None where its tag does not say."""
    sections = members(info.annotation)
    if len(sections) == 1:
        return sections[0]
    given = value if isinstance(value, Mapping) else {}
    return next((section for section in sections if given.get(tag(section)[0]) == tag(section)[1]), None)


def section_at(root: type[RecipeSection], data: Any, path: KeyPath) -> type[RecipeSection] | None:
    """The section whose keys stand at `path`; None where there is none, or it cannot be told."""
    section: type[RecipeSection] | None = root
    for part in path:
        if section is None or not isinstance(part, str) or part not in section.model_fields:
            return None
        data = data.get(part) if isinstance(data, Mapping) else None
        section = choose(section.model_fields[part], data)
    return section


def field_at(root: type[RecipeSection], data: Any, path: KeyPath) -> FieldInfo | None:
    """The field at `path` (of a list's item: the list)."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    if not path:
        return None
    section = section_at(root, data, path[:-1])
    return section.model_fields.get(str(path[-1])) if section else None


def without_tags(root: type[RecipeSection], location: Sequence[str | int]) -> KeyPath:
    """Pydantic's location of an error, less the tags of unions that it puts in.

    ("runtime", "cpu", "threads") -> ("runtime", "threads")
    """
    path: list[str | int] = []
    section: type[RecipeSection] | None = root
    rest = list(location)
    while rest:
        part = rest.pop(0)
        path.append(part)
        info = section.model_fields.get(str(part)) if section else None
        sections = members(info.annotation) if info else []
        section = sections[0] if len(sections) == 1 else None
        if len(sections) > 1 and rest:
            section = next((member for member in sections if tag(member)[1] == rest[0]), None)
            if section is not None:
                rest.pop(0)
    return tuple(path)


def all_keys(root: type[RecipeSection], prefix: str = "") -> Iterator[str]:
    """Every dotted key, of all members of unions."""
    for name, info in root.model_fields.items():
        yield prefix + name
        for section in members(info.annotation):
            yield from all_keys(section, f"{prefix}{name}.")
