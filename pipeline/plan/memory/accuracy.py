"""Errors of the memory model on published measurements, as `benchmarks/published_memory.py` has computed them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal

from pipeline.resources import parse_yaml

DATA = Path(__file__).parent / "data" / "accuracy.yaml"


@dataclass(frozen=True, slots=True)
class MeasurementError:
    """One figure, measured and computed."""

    what: str
    measured: float
    computed: float
    source: str

    @property
    def error(self) -> float:
        """Relative: -0.02 is two percent too small."""
        return self.computed / self.measured - 1


@dataclass(frozen=True, slots=True)
class MeasurementErrors:
    """All compared figures of one kind."""

    figures: tuple[MeasurementError, ...]

    @property
    def median(self) -> float:
        """Median of the relative errors, without sign."""
        return median(abs(figure.error) for figure in self.figures)

    @property
    def worst(self) -> float:
        """Largest of the relative errors, without sign."""
        return max(abs(figure.error) for figure in self.figures)


@cache
def measurement_errors(kind: Literal["capacity", "load_log"]) -> MeasurementErrors:
    """Errors of sequences that a KV cache holds, at all published points; or of weights and blocks in engines' logs."""
    rows = parse_yaml(DATA.read_text("utf-8"))[kind]
    return MeasurementErrors(tuple(MeasurementError(**row) for row in rows))
