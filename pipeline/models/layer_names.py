"""Lists of layers in quantization settings: by name, with wildcards, or by regular expressions."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator

# Before the names that weights have here.
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.")
_PREFIX = re.compile(r"^(?:model\.language_model|language_model\.model|model|language_model|backbone)\.")
# A name in a list that stands for several layers, which are one in other programs.
_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj", "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz",
}  # fmt: skip
_EXPERT = re.compile(r"\.experts\.(\d+)(?=\.|$)")


class NamePatterns:
    """Names of layers, or of what they lie in; with wildcards; or regular expressions behind `re:`."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Compile the patterns. Raises re.error for an invalid regular expression."""
        self._names: set[str] = set()
        matched, searched = [], []
        for pattern in patterns:
            if pattern.startswith("re:"):
                searched.append(f"(?:{pattern[3:]})")
            elif any(sign in pattern for sign in "*?["):
                matched.append(fnmatch.translate(_PREFIX.sub("", pattern)))
            else:
                self._names.add(_PREFIX.sub("", pattern))
        self._wild = re.compile("|".join(matched)) if matched else None
        self._searched = re.compile("|".join(searched)) if searched else None

    def __bool__(self) -> bool:
        return bool(self._names or self._wild or self._searched)

    @property
    def expert_names(self) -> bool:
        """Whether single experts are named."""
        wild = "" if self._wild is None else self._wild.pattern.replace("\\", "")
        return any(_EXPERT.search(name) for name in (*self._names, wild))

    def match(self, name: str) -> bool:
        """Whether a layer, or something that it lies in, is among them."""
        return (
            bool(self._names and not self._names.isdisjoint(_parts(name)))
            or (
                self._wild is not None
                and any(self._wild.match(candidate) for candidate in (name, f"model.{name}"))
            )
            or (
                self._searched is not None
                and any(self._searched.match(prefix + name) for prefix in _PREFIXES)
            )
        )


def bare_name(name: str) -> str:
    """Return a tensor's name without what the decoder lies in.

    >>> bare_name("model.language_model.layers.0.self_attn.q_proj.weight")
    'layers.0.self_attn.q_proj.weight'
    """
    return _PREFIX.sub("", name)


def fused_names(name: str) -> Iterator[str]:
    """Yield names under which a layer may be stored joined with others: qkv, gate and up, all experts in one tensor."""
    head, _, last = name.rpartition(".")
    joined = _FUSED.get(last)
    stacked = _EXPERT.sub(".experts", name)
    if joined:
        yield f"{head}.{joined}"
    if stacked != name:
        yield stacked
        if joined:
            yield f"{_EXPERT.sub('.experts', head)}.{joined}"


def _parts(name: str) -> Iterator[str]:
    """A layer's name, the names of what it lies in, and the ends of its name, which some lists give alone."""
    steps = name.split(".")
    fused = _FUSED.get(steps[-1])
    for path in (steps, [*steps[:-1], fused] if fused else steps):
        for index in range(1, len(path) + 1):
            yield ".".join(path[:index])
            yield ".".join(path[-index:])
