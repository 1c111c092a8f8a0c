"""Values of a recipe by dotted key, for what reads them without knowing its sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class InvalidValue(LookupError):
    """A rule reads a value that is itself at fault."""


class RecipeValues:
    """The values of a valid recipe, with all defaults, by dotted key; None under a section that is absent."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        value: Any = self._data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value
