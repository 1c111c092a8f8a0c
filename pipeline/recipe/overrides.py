"""Overrides of the command line: `--set a.b=c` replaces a value before the recipe is validated.

The value is YAML: numbers, `true`, `null`, lists and whole sections (`runtime={kind: cpu}`) can be given.
A later override wins over an earlier one. Overriding a key is the same as editing the file.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import Fault
from pipeline.recipe.document import Document, Path, Place, dotted
from pipeline.recipe.yaml_reader import read_value


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Change the document's data; an override that cannot be applied becomes a fault of the document."""
    for override in overrides:
        key, equals, text = override.partition("=")
        path: Path = tuple(key.strip().split("."))
        if not equals or not all(part and part.strip() == part for part in path if isinstance(part, str)):
            document.faults.append(
                Fault("is not an override", where="--set", key=override, fix="write --set section.key=value")
            )
            continue
        before = len(document.faults)
        value = read_value(text, document, path)
        if len(document.faults) == before:
            _put(document, path, value, text)


def _put(document: Document, path: Path, value: object, text: str) -> None:
    section = document.data
    for depth, part in enumerate(path[:-1], start=1):
        if section.get(str(part)) is None:
            section[str(part)] = {}
            document.places[path[:depth]] = Place("--set")
        inner = section[str(part)]
        if not isinstance(inner, dict):
            problem = f"{dotted(path[:depth])} is not a section"
            document.faults.append(Fault(problem, where="--set", key=dotted(path), value=text))
            return
        section = inner
    section[str(path[-1])] = value
