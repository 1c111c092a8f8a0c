"""What a rule across fields reads and says; the rules themselves are in `rules.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule: the keys it is about, the one to change first."""

    keys: tuple[str, ...]
    text: str
    fix: str
    rule: str = ""  # id of the rule of preflight that it is the same as, where there is one

    def as_error(self) -> PydanticCustomError:
        return PydanticCustomError(
            "rule", "{problem}", {"problem": self.text, "fix": self.fix, "keys": self.keys, "rule": self.rule}
        )


class Unsound(LookupError):
    """The value is itself at fault."""


class Values:
    """The values of a sound recipe, with all defaults, by dotted key; None under a section that is absent."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        value: Any = self._data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


Rule = Callable[[Values], Iterator[Problem]]
