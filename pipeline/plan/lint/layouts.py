"""Tensors of a quantized layer by format (`contracts/data/checkpoint_layouts.yaml`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pipeline.contracts import read_facts
from pipeline.models.blocks import WeightTensor

_FILE = "checkpoint_layouts.yaml"
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Layout:
    """How one tool stores a layer in a format.

    Attributes:
        carrier: Part with the packed weights.
        types: Types of the carrier, as safetensors spells them.
        scales: Names of a part, of which one is held -> what each of its numbers is for.
        inputs: Part with the scale of the inputs; "": there is none.
        group: Columns of a group where the settings leave it open; 0: no number is known.
    """

    format: str
    carrier: str
    bits: int
    types: tuple[str, ...]
    scales: Mapping[tuple[str, ...], str]
    inputs: str = ""
    group: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Parts that hold scales and zero points."""
        return (*(name for names in self.scales for name in names), *((self.inputs,) if self.inputs else ()))

    def counts(self, kind: str, weights: Sequence[WeightTensor]) -> set[int]:
        """Return how many numbers a scale of weights may have that are stored together; empty: any."""
        copies = sum(weight.copies for weight in weights)
        if kind == "tensor":
            # One for all that are stored together, one each, or one for the parts that are joined (gate and up).
            return {count for count in range(1, copies + 1) if copies % count == 0}
        if kind == "row":
            rows = sum(weight.rows * weight.copies for weight in weights)
            return {rows, 1} if self.format == "int8_row" else {rows}
        if kind == "column":
            return {weight.columns for weight in weights}
        if kind == "block":
            blocks = (
                math.ceil(weight.rows / _BLOCK) * math.ceil(weight.columns / _BLOCK) * weight.copies
                for weight in weights
            )
            return {sum(blocks)}
        if kind == "group" and all(weight.group or self.group for weight in weights):
            return {
                sum(
                    weight.rows * math.ceil(weight.columns / (weight.group or self.group)) * weight.copies
                    for weight in weights
                )
            }
        return set()


def layouts_of(form: str) -> tuple[Layout, ...]:
    """Return the layouts in which a format is published; none for weights that are not quantized."""
    return tuple(layout for layout in _layouts() if layout.format == form)


def served(part: str) -> str:
    """Return what a server does with a checkpoint that lacks a part."""
    return str(read_facts(_FILE)["served"][part]["text"])


@cache
def _layouts() -> tuple[Layout, ...]:
    return tuple(
        Layout(
            format=entry["format"],
            carrier=entry["carrier"],
            bits=entry["bits"],
            types=tuple(entry["types"]),
            scales={tuple(names.split("|")): kind for names, kind in entry["scales"].items()},
            inputs=entry.get("inputs", ""),
            group=entry.get("group", 0),
        )
        for entry in read_facts(_FILE)["layouts"]
    )


# Parts that are no weights, and those that are scales: of layers, and of keys and values.
BESIDE: frozenset[str] = frozenset(read_facts(_FILE)["beside"]["parts"])
SCALES: frozenset[str] = frozenset(
    {name for layout in _layouts() for name in layout.names if "zero" not in name}
    | {name for name in BESIDE if name.endswith("_scale")}
)
