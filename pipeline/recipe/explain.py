"""What pydantic's errors mean in the words of a recipe: the problem, and what would be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from pipeline.recipe.document import Path, dotted
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.shape import all_keys, field_at, members, section_at, tag

_TYPES = {  # pydantic's error type -> what the value must be
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text",
    "tuple_type": "a list", "model_type": "a section of keys", "model_attributes_type": "a section of keys",
}  # fmt: skip
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
UNION = ("union_tag_not_found", "union_tag_invalid")


def explain(error: ErrorDetails, path: Path, text: str | None, data: Mapping[str, Any]) -> tuple[str, str]:
    """Problem and fix of an error at `path`; `text` is what was written there, `data` the whole document."""
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    info = field_at(Recipe, data, path)
    if kind == "refused":
        return context["problem"], context["fix"]
    if kind == "missing":
        return "is missing", _example(info)
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
    >>> from pipeline.recipe.limits import Limits
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


def _allowed(path: Path, data: Mapping[str, Any]) -> str:
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
