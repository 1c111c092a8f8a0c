"""The base of every section of a recipe: immutable, strict about types, and closed to unknown keys.

A section holds values and their bounds. Rules that span fields are in `rules.py` and hold for a whole recipe.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A mapping of the recipe file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def refusal(problem: str, fix: str = "") -> PydanticCustomError:
    """What a field validator raises: the problem, and what would be right."""
    return PydanticCustomError("refused", "{problem}", {"problem": problem, "fix": fix})


def require_tag(schema: dict[str, Any]) -> None:
    """Make the JSON schema of a union's default member ask for `kind`, as the loader does."""
    schema["required"] = ["kind", *schema.get("required", [])]
