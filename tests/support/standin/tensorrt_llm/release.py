"""The release that is stood for: its signatures, from `release.json`, which tests write beside this file."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_RELEASE = json.loads((Path(__file__).parent / "release.json").read_text(encoding="utf-8"))
sys.path.insert(0, _RELEASE["root"])
VERSION: str = _RELEASE["version"]
ATTRIBUTES: dict[str, list[str]] = _RELEASE["attributes"]


def signature(call: str) -> inspect.Signature:
    kinds = list(inspect._ParameterKind)
    return inspect.Signature(
        [
            inspect.Parameter(
                call["name"], kinds[call["kind"]], default=call.get("default", inspect.Parameter.empty)
            )
            for call in _RELEASE["calls"][call]
        ]
    )


def bound(call: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """All arguments of a call by their names, defaults too; a TypeError where the release takes no such call."""
    try:
        made = signature(call).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{call}() of TensorRT-LLM {VERSION}: {error}") from None
    made.apply_defaults()
    return dict(made.arguments)


def method(call: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method that gets all arguments of the call by name."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, **bound(call, *args, **kwargs))

        return called

    return decorate


class Parameters:
    """An object whose attributes are the parameters of its class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(self).update(bound(type(self).__name__, *args, **kwargs))
        self.check()

    def check(self) -> None:
        """Raise ValueError as upstream does."""

    @property
    def changed(self) -> dict[str, Any]:
        """Attributes that are not defaults, or have none."""
        defaults = {
            name: parameter.default for name, parameter in signature(type(self).__name__).parameters.items()
        }
        return {name: value for name, value in vars(self).items() if value != defaults[name]}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.changed.items())})"
