"""The `parameters` of a model's config.pbtxt: strings there, typed here.

Paths are relative to the model's folder, so that a repository can be moved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TRUE, _FALSE = {"true", "yes", "1", "t", "y"}, {"false", "no", "0", "f", "n"}


def is_decoupled(config: Mapping[str, Any]) -> bool:
    """Whether a model may send several responses to a request, by its config; else it must send just one."""
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))


class Parameters:
    """Arguments that Triton gives to `initialize`, as values.

    >>> Parameters(args).number("end_id")
    2
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        declared = config.get("parameters", {})
        self.decoupled = is_decoupled(config)
        self._folder = Path(args["model_repository"])
        self._model = args["model_name"]
        self._values = {name: entry["string_value"] for name, entry in declared.items()}

    def text(self, name: str, default: str | None = None) -> str:
        """The value as it stands.

        Raises:
            ValueError: It is missing and has no default.
        """
        value = self._values.get(name, default)
        if value is None:
            raise ValueError(f"{self._model}/config.pbtxt: parameter {name} is missing")
        return str(value)

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.text(name, None if default is None else str(default))
        try:
            return int(value)
        except ValueError:
            raise self._fault(name, value, "a whole number") from None

    def numbers(self, name: str) -> tuple[int, ...]:
        """Whole numbers between commas; none when the parameter is missing or empty."""
        value = self.text(name, "")
        try:
            return tuple(int(part) for part in value.split(",") if part)
        except ValueError:
            raise self._fault(name, value, "whole numbers between commas") from None

    def flag(self, name: str, default: bool | None = None) -> bool:
        """true or false, in the words that TensorRT-LLM's models take."""
        value = self.text(name, None if default is None else str(default)).lower()
        if value not in _TRUE | _FALSE:
            raise self._fault(name, value, "true or false")
        return value in _TRUE

    def path(self, name: str, default: str | None = None) -> Path:
        """A path; a relative one begins at the model's folder."""
        return self._folder / self.text(name, default)

    def has(self, name: str) -> bool:
        """Whether the parameter is there at all."""
        return name in self._values

    def _fault(self, name: str, value: str, right: str) -> ValueError:
        return ValueError(f"{self._model}/config.pbtxt: parameter {name} = {value}: must be {right}")
