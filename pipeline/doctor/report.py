"""The doctor's report as values: for a table, and for JSON whose keys stay as they are within one `schema`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from pipeline.machine.inventory import Inventory
from pipeline.machine.packages import Extra, PythonFacts

SCHEMA = 1
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")  # `pipeline recipes schema doctor`
State = Literal[
    "ok",
    "note",  # worth knowing, nothing to do
    "warning",  # works, but badly or not for all
    "missing",  # recipes that need it cannot run
    "unknown",  # nobody could tell in time
]
WayName = Literal["build", "local", "docker"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line about the machine."""

    subject: str  # "driver"
    state: State
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Lines that belong together."""

    title: str
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why something cannot be done here."""

    subject: str  # key of the recipe, or what of the machine: "machine.driver", "packages"
    problem: str
    fix: str = ""
    rule: str | None = None  # id of the rule, where it is one of preflight's


@dataclass(frozen=True, slots=True)
class Way:
    """One thing that may be done with a recipe here: build it, or deploy it natively or in a container."""

    name: WayName
    possible: bool
    obstacles: tuple[Obstacle, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one recipe."""

    recipe: str  # as it was named
    file: str | None
    runtime: str | None  # None: it cannot be read
    gpus: int  # that it needs
    gpu: str | None
    runnable: bool  # it can be built here, and deployed here in one way at least
    ways: tuple[Way, ...]
    warnings: tuple[Obstacle, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """How this process reads and writes text."""

    encoding: str  # of files, unless they say otherwise
    output: str  # of standard output
    file_names: str
    language: str  # LC_ALL, LC_CTYPE or LANG, whichever holds; "" for none

    @property
    def is_utf8(self) -> bool:
        """Whether all text of a model can be printed and written."""
        names = (self.encoding, self.output, self.file_names)
        return all(name.lower().replace("-", "").replace("_", "") == "utf8" for name in names)


@dataclass(frozen=True, slots=True)
class Report:
    """The whole report."""

    schema: int
    time: str  # ISO 8601, UTC
    seconds: float  # that it took
    runnable: bool  # all recipes that were named; at least one, if none was
    sections: tuple[Section, ...]
    recipes: tuple[Verdict, ...]
    python: PythonFacts
    extras: tuple[Extra, ...]
    text: Text
    server: str | None  # version of the embedded Triton, if it can run
    machine: Inventory

    @property
    def exit_code(self) -> int:
        """0, or 2 where what was asked about cannot run here."""
        return 0 if self.runnable else 2

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`; described by `json_schema`."""
        made: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return made


def json_schema() -> dict[str, Any]:
    """JSON schema of `Report.as_json`."""
    return _adapter().json_schema(mode="serialization")


def schema_text() -> str:
    """The same, as it is printed."""
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"


def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Report)
