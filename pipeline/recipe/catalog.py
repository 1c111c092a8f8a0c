"""What the packaged recipes are: the rows of `pipeline recipes ls`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InvalidInput
from pipeline.recipe.library import headline, packaged
from pipeline.recipe.loading import load_recipe
from pipeline.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Entry:
    """One packaged recipe; `recipe` is None where the file is not valid."""

    name: str
    file: Path
    purpose: str
    recipe: Recipe | None

    @property
    def runtime(self) -> str:
        return self.recipe.runtime.kind if self.recipe else "not valid"

    @property
    def quantization(self) -> str:
        return self.recipe.quantization.format if self.recipe else ""


def entries() -> list[Entry]:
    """All packaged recipes, by name."""
    found = []
    for name, file in packaged().items():
        try:
            recipe = load_recipe(file)
        except InvalidInput:
            recipe = None
        purpose = headline(file.read_text(encoding="utf-8", errors="replace"))
        found.append(Entry(name, file, purpose, recipe))
    return found
