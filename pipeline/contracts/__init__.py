"""Facts about upstream versions and hardware, as data (`data/*.yaml`, each with its source), and functions that answer.

A release, a GPU, a model or a rule is added by adding data; the header of each file says how. Nothing of upstream is
imported, and nothing is decided here: what follows from the facts is worked out in `pipeline.plan` and the runtimes.
Every function raises UserError for a version that is not known; its text names those that are near.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from pydantic import TypeAdapter

from pipeline.resources import parse_yaml

Record = TypeVar("Record")


@cache
def read_facts(file: str) -> Mapping[str, Any]:
    """Return the content of a file of `data/`, such as "gpus.yaml"."""
    facts: Mapping[str, Any] = parse_yaml((resources.files(__name__) / "data" / file).read_text("utf-8"))
    return facts


def record(kind: type[Record], entry: Mapping[str, Any]) -> Record:
    """Make a record, a dataclass, of an entry of the data; keys that are no fields of it are left out."""
    made: Record = _adapter(kind).validate_python(entry)  # type: ignore[arg-type]
    return made


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
