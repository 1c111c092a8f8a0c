"""Where a recipe was read from. It says nothing about what the recipe is: any two compare equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.recipe.library import packaged


@dataclass(frozen=True, slots=True)
class Provenance:
    """The file (None for a recipe made in Python), and the overrides of the command line.

    >>> str(Provenance(Path("r.yaml"), ("limits.max_concurrency=4",)))
    'r.yaml with --set limits.max_concurrency=4'
    """

    file: Path | None = field(default=None, compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)

    @property
    def words(self) -> tuple[str, ...]:
        """What names the recipe again on a command line, in any folder: its packaged name or its path, and --set."""
        if self.file is None:
            return ()
        name = self.file.stem if packaged().get(self.file.stem) == self.file else str(self.file)
        return (name, *(word for override in self.overrides for word in ("--set", override)))

    def __str__(self) -> str:
        return " ".join(
            [str(self.file), *(["with"] if self.overrides else []), *(f"--set {o}" for o in self.overrides)]
        )
