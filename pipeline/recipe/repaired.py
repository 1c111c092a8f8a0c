"""A recipe with faults, as it would be without them, so that what else is wrong can be said at the same time.

What is wrong is replaced by its default, or by a value that could stand; a finding counts only if it is about none
of these keys. Where too much is a guess (which runtime, which model), there is no such recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from annotated_types import Ge, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from pipeline.document_faults import UNION, field_at, members, without_tags
from pipeline.documents import KeyPath, dotted
from pipeline.errors import InvalidInput
from pipeline.recipe.loading import overridden_document, recipe_context
from pipeline.recipe.recipe import Recipe, RecipeProvenance

# One repair may show what pydantic had not come to before.
_MOST_ROUNDS = 8
_USUAL_NUMBER = 1024


def load_repaired(path_or_name: str | Path, overrides: Sequence[str]) -> tuple[Recipe, frozenset[str]] | None:
    """Load a recipe that has faults, without them.

    Returns:
        The recipe, and the keys whose values are not those that were given; None if it cannot be repaired.
    """
    try:
        file, document = overridden_document(path_or_name, overrides)
    except InvalidInput:
        return None
    if not document.is_mapping:
        return None
    replaced = {fault.key.partition("[")[0] for fault in document.faults}
    for _ in range(_MOST_ROUNDS):
        try:
            recipe = Recipe.model_validate(document.data, context=recipe_context(file))
            return recipe.read_from(RecipeProvenance(file.resolve(), tuple(overrides))), frozenset(replaced)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                if detail["type"] in UNION:
                    return None
                if detail["type"] == "rule":
                    keys = detail["ctx"]["keys"]
                    replaced |= set(keys)
                    path: KeyPath = tuple(keys[0].split("."))
                else:
                    path = _without_items(without_tags(Recipe, detail["loc"]))
                path = _repair(document.data, path)
                if not path:
                    return None
                replaced.add(dotted(path))
    return None


def _without_items(path: KeyPath) -> KeyPath:
    key_path: list[str | int] = []
    for part in path:
        if isinstance(part, int):
            break
        key_path.append(part)
    return tuple(key_path)


def _repair(data: dict[str, Any], path: KeyPath) -> KeyPath:
    """Replace what stands at a path. Returns the path that was replaced, which may be a section; () if none can be."""
    if not path:
        return ()
    if path == ("draft", "source"):
        path = ("draft",)
    section: Any = data
    for part in path[:-1]:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict):
        # It went with the section around it.
        return path
    info = field_at(Recipe, data, path)
    section.pop(str(path[-1]), None)
    if info is not None and info.is_required():
        sample = None if path[-1] == "source" else _sample(info)
        if sample is None:
            return ()
        section[str(path[-1])] = sample
    return path


def _sample(info: FieldInfo) -> Any:
    """A value that could stand in a field; None if none is known."""
    sections = members(info.annotation)
    if len(sections) == 1:
        fields = {name: field for name, field in sections[0].model_fields.items() if field.is_required()}
        values = {name: _sample(field) for name, field in fields.items() if name != "source"}
        return values if len(values) == len(fields) and None not in values.values() else None
    if info.examples:
        return info.examples[0]
    bounds: dict[type, Any] = {type(bound): bound for bound in info.metadata}
    if Ge not in bounds:
        return None
    high = bounds[Le].le if Le in bounds else _USUAL_NUMBER
    return max(bounds[Ge].ge, min(high, _USUAL_NUMBER))
