"""One figure of a memory plan, with the formula that it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Group = Literal["runtime", "weights", "activations", "communication", "kv_cache", "graphs"]


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes on one rank."""

    group: Group
    role: str  # "target" | "draft"; "" for what no model owns
    name: str  # "attention"
    bytes: int
    formula: str
    sources: tuple[str, ...]

    @property
    def key(self) -> str:
        """`weights.target.attention`"""
        return ".".join(part for part in (self.group, self.role, self.name) if part)
