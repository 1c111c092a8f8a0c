"""What was read of a recipe file: plain values, the place of each, and what is wrong with the file's form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import Fault

Path = tuple[str | int, ...]  # ("quantization", "calibration", "samples")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was given, and how it was written there."""

    where: str  # file, or --set
    line: int | None = None  # 1-based
    text: str | None = None  # of a scalar


@dataclass(slots=True)
class Document:
    """What was read: `data` goes as far as it can even where there are faults."""

    where: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, Place] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    is_mapping: bool = True  # False where nothing else can be said of the file

    def place(self, path: Path) -> Place:
        """The place of a key, or of the nearest section around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(self.where, 1))

    def refuse(self, problem: str, *, line: int | None, path: Path = (), fix: str = "") -> None:
        self.faults.append(Fault(problem, where=self.where, line=line, key=dotted(path), fix=fix))


def dotted(path: Path) -> str:
    """
    >>> dotted(("quantization", "export_tensor_parallel", 0))
    'quantization.export_tensor_parallel[0]'
    """
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
