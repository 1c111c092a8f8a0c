"""Pairs of questions of known forms: see phenomena.yaml."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_DATA: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Phenomenon:
    """Two questions that one answer does not serve, whatever their slots are filled with."""

    name: str
    one: str
    other: str

    def pairs(self, count: int) -> Iterator[tuple[str, str]]:
        """The same ones each time."""
        draw = random.Random(self.name)
        for _ in range(count):
            slots = {
                f"{name}{number}": value
                for name, values in _DATA["slots"].items()
                for number, value in zip(("", "2"), draw.sample(values, 2), strict=True)
            }
            yield _filled(self.one, slots), _filled(self.other, slots)


def _filled(form: str, slots: Mapping[str, Any]) -> str:
    return re.sub(r"\ba (?=[aeiou])", "an ", form.format(**slots))


TRAPS = [Phenomenon(name, *forms) for name, forms in _DATA["traps"].items()]
