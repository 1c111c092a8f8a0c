"""Tensors of a quantized layer by format (`contracts/data/checkpoint_layouts.yaml`); those of the files by name: the
layer that each is a part of, and the kind of layer.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pipeline.contracts import read_facts, record
from pipeline.models.blocks import WeightTensor
from pipeline.models.header import HeaderEntry
from pipeline.models.layer_names import bare_name

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
    entries = read_facts(_FILE)["layouts"]
    return tuple(
        record(
            Layout,
            {**entry, "scales": {tuple(names.split("|")): kind for names, kind in entry["scales"].items()}},
        )
        for entry in entries
    )


# Parts that are no weights, and those that are scales: of layers, and of keys and values.
BESIDE: frozenset[str] = frozenset(read_facts(_FILE)["beside"]["parts"])
SCALES: frozenset[str] = frozenset(
    {name for layout in _layouts() for name in layout.names if "zero" not in name}
    | {name for name in BESIDE if name.endswith("_scale")}
)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_STACKED = re.compile(r"(.*\.experts\.(?:gate_up_proj|down_proj))(?:_(\w+))?")
_IGNORED = ("rotary_emb.inv_freq",)  # old checkpoints carry it; it follows from the configuration


class StoredTensors:
    """Tensors of the files: by bare name, and the parts of each layer."""

    def __init__(self, tensors: Mapping[str, HeaderEntry]) -> None:
        self.plain: dict[str, HeaderEntry] = {}
        self.layers: dict[str, dict[str, HeaderEntry]] = defaultdict(dict)
        self.used: set[str] = set()
        for name, entry in tensors.items():
            bare = bare_name(name)
            self.plain[bare] = entry
            layer, part = split_name(bare)
            self.layers[layer][part] = entry

    def is_scale(self, name: str) -> bool:
        """Whether a tensor is a scale, by its name."""
        return split_name(bare_name(name))[1] in SCALES

    def unused(self) -> list[str]:
        """Return the names of tensors that nothing asked for, as the checkpoint spells them."""
        return sorted(
            entry.name
            for bare, entry in self.plain.items()
            if entry.name not in self.used
            and not bare.endswith(_IGNORED)
            and split_name(bare)[1] not in BESIDE
        )


def split_name(bare: str) -> tuple[str, str]:
    """Return layer and part: "…q_proj" and "weight_scale", "…experts.down_proj" and "blocks"."""
    if stacked := _STACKED.fullmatch(bare):
        return stacked[1], stacked[2] or "weight"
    layer, _, part = bare.rpartition(".")
    return layer, part


def kind_of(name: str) -> str:
    """Return a name with a star for each number."""
    return _NUMBER.sub("*", name)


def kinds_of(names: Iterable[str]) -> Iterator[str]:
    """Yield each kind of name once."""
    return iter(dict.fromkeys(map(kind_of, names)))


def room_of(name: str) -> str:
    """Return the layer that a tensor lies in, "layers.3"; "" for what lies beside the layers."""
    match = re.match(r"(?:\w+\.)*?layers\.\d+(?=\.)", name)
    return match[0] if match else ""
