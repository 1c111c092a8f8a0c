"""Names of a checkpoint's tensors: the layer that each is a part of, and the kind of layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from pipeline.models.header import HeaderEntry
from pipeline.models.layer_names import bare_name
from pipeline.plan.lint.layouts import BESIDE, SCALES

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
    found = re.match(r"(?:\w+\.)*?layers\.\d+(?=\.)", name)
    return found[0] if found else ""
