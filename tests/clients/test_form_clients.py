"""Programs that want answers in a form."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.programs import Program

QUESTION = "Where is my order TP-174685?"


def test_instructor(program: Callable[[str], Program]) -> None:
    said = program("instructor").script("forms.py", QUESTION)
    for mode in ("TOOLS", "JSON_SCHEMA"):
        assert said[mode]["place"] in ("depot", "van", "door")
        assert 0 <= said[mode]["days"] <= 30
    assert said["JSON"] == ["stop", "dict"]
