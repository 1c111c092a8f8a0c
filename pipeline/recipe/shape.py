"""What may stand at each key of a recipe, read off the models: used to explain faults, never to validate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pipeline.recipe.document import Path
from pipeline.recipe.section import Section


def members(annotation: Any) -> list[type[Section]]:
    """The sections that an annotation allows.

    >>> from pipeline.recipe.limits import Limits
    >>> [section.__name__ for section in members(Limits | None)]
    ['Limits']
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in members(part)]


def tag(section: type[Section]) -> tuple[str, str]:
    """The key and value that tell a member of a union, such as ("kind", "cpu")."""
    for name, info in section.model_fields.items():
        if get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1:
            return name, get_args(info.annotation)[0]
    raise TypeError(f"{section.__name__} has no tag")


def choose(info: FieldInfo, value: Any) -> type[Section] | None:
    """The section that `value` is meant as; None where its tag does not say."""
    sections = members(info.annotation)
    if len(sections) == 1:
        return sections[0]
    given = value if isinstance(value, Mapping) else {}
    return next((section for section in sections if given.get(tag(section)[0]) == tag(section)[1]), None)


def section_at(root: type[Section], data: Any, path: Path) -> type[Section] | None:
    """The section whose keys stand at `path`; None where there is none, or it cannot be told."""
    section: type[Section] | None = root
    for part in path:
        if section is None or not isinstance(part, str) or part not in section.model_fields:
            return None
        data = data.get(part) if isinstance(data, Mapping) else None
        section = choose(section.model_fields[part], data)
    return section


def field_at(root: type[Section], data: Any, path: Path) -> FieldInfo | None:
    """The field at `path` (of a list's item: the list)."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    if not path:
        return None
    section = section_at(root, data, path[:-1])
    return section.model_fields.get(str(path[-1])) if section else None


def without_tags(root: type[Section], location: Sequence[str | int]) -> Path:
    """Pydantic's location of an error, less the tags of unions that it puts in.

    ("runtime", "cpu", "threads") -> ("runtime", "threads")
    """
    path: list[str | int] = []
    section: type[Section] | None = root
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


def all_keys(root: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key, of all members of unions."""
    for name, info in root.model_fields.items():
        yield prefix + name
        for section in members(info.annotation):
            yield from all_keys(section, f"{prefix}{name}.")
