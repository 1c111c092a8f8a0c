"""Overrides of documents: `--set section.key=value`, and options like it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.documents import Document, KeyPath, KeyPlace, dotted, read_value
from pipeline.errors import Fault


def apply_overrides(document: Document, overrides: Sequence[str], option: str = "--set") -> None:
    """Replace values of a document by `section.key=value`, whose value is YAML; what cannot be becomes a fault of it.

    Args:
        document: Document whose data are changed.
        overrides: Later ones win.
        option: Option that gave them, which faults name.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        path: KeyPath = tuple(key.strip().split("."))
        if not equals or not all(part and part.strip() == part for part in path if isinstance(part, str)):
            document.faults.append(
                Fault(
                    "is not an override", where=option, key=override, fix=f"write {option} section.key=value"
                )
            )
            continue
        before = len(document.faults)
        value = _read_value(text, document, path, option)
        if len(document.faults) == before:
            _put(document, path, value, text, option)


def _read_value(text: str, document: Document, path: KeyPath, option: str) -> Any:
    """Parse the value of an override; its faults and places go to the document."""
    value, part = read_value(text, option, path)
    document.faults += [
        Fault(f.problem, where=option, key=dotted(path), value=text, fix=f.fix) for f in part.faults
    ]
    document.formless |= part.formless
    document.forget(path)
    for known, place in part.places.items():
        document.places[known] = KeyPlace(option, text=place.text)
    document.places[path] = KeyPlace(option, text=text)
    return value


def _put(document: Document, path: KeyPath, value: object, text: str, option: str) -> None:
    section = document.data
    for depth, part in enumerate(path[:-1], start=1):
        if section.get(str(part)) is None:
            section[str(part)] = {}
            document.places[path[:depth]] = KeyPlace(option)
        inner = section[str(part)]
        if not isinstance(inner, dict):
            problem = f"{dotted(path[:depth])} is not a section"
            document.faults.append(Fault(problem, where=option, key=dotted(path), value=text))
            return
        section = inner
    section[str(path[-1])] = value
