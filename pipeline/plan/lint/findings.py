"""A finding, and those about a checkpoint's index and the scales of its KV cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import SourceError
from pipeline.models.header import HeaderEntry
from pipeline.models.published import quantization_settings
from pipeline.models.sizes import ModelSizes
from pipeline.plan.lint.layouts import StoredTensors, served

Severity = Literal["error", "warning", "not judged"]
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NAMED = 8  # names that a line shows


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a checkpoint, or that could not be judged.

    Attributes:
        names: Tensors, as the checkpoint spells them, or would.
        expected: Shape, type or value that would be right.
        served: Behaviour of a server with the checkpoint as it is.
    """

    severity: Severity
    problem: str
    names: tuple[str, ...] = ()
    expected: str = ""
    served: str = ""

    def __str__(self) -> str:
        shown = ", ".join(self.names[:_NAMED])
        more = f" and {len(self.names) - _NAMED} more" if len(self.names) > _NAMED else ""
        text = f"{self.severity}: {self.problem}" + (f": {shown}{more}" if shown else "")
        text += f" (expected: {self.expected})" if self.expected else ""
        return text + (f"; {self.served}" if self.served else "")


def refuse_errors(
    findings: Sequence[Finding], label: str, say: Callable[[str], None], *, allowed: bool = False
) -> None:
    """Say what is wrong with a checkpoint before its weights are brought, and refuse errors.

    Args:
        label: Where it comes from, as "hf:org/name".
        allowed: Whether errors are let pass, and only said.

    Raises:
        SourceError: With every error.
    """
    errors = () if allowed else tuple(finding for finding in findings if finding.severity == "error")
    for finding in findings:
        if finding not in errors:
            say(f"{label}: {finding}")
    if errors:
        text = "\n".join(f"  {str(error).removeprefix('error: ')}" for error in errors)
        raise SourceError(
            f"{label}: the checkpoint is damaged, and its weights are not brought:\n{text}\n"
            "take another revision or another checkpoint, or let it pass with --allow source.weights"
        )


def index_findings(
    files: Mapping[str, Sequence[HeaderEntry]], index: Mapping[str, str] | None
) -> Iterator[Finding]:
    """Compare an index with the files; None: there is none."""
    placed: dict[str, str] = {}
    twice: list[str] = []
    for file, entries in files.items():
        for entry in entries:
            if entry.name in placed:
                twice.append(entry.name)
            placed.setdefault(entry.name, file)
    if twice:
        yield Finding(
            "error", "is in two files", tuple(twice), "one of them", "which one is served is left to chance"
        )
    if index is None:
        return
    lost = tuple(sorted(name for name in index if name not in placed))
    moved = tuple(sorted(name for name, file in index.items() if placed.get(name, file) != file))
    extra = tuple(sorted(placed.keys() - index.keys()))
    if lost:
        yield Finding(
            "error", "is in the index, and in no file", lost, "a tensor in its file", "servers refuse it"
        )
    if moved:
        yield Finding(
            "error", "is in another file than the index says", moved, "the index's file", "servers refuse it"
        )
    if extra:
        yield Finding("warning", "is in a file, and not in the index", extra, "an entry in the index",
                      "servers that go by the index do not load it")  # fmt: skip


def kv_findings(sizes: ModelSizes, stored: StoredTensors) -> Iterator[Finding]:
    """Find layers without scales of their keys and values."""
    if sizes.kv_cache not in ("fp8", "nvfp4", "int8"):
        return
    scales: dict[str, dict[int, str]] = {"k_scale": {}, "v_scale": {}}
    for bare, entry in stored.plain.items():
        part, layer = bare.rsplit(".", 1)[-1], _LAYER.search(bare)
        if part in scales and layer is not None:
            scales[part][int(layer[1])] = entry.name
    if not any(scales.values()):
        yield Finding("warning", f"no scales of the {sizes.kv_cache} KV cache", (), "k_scale and v_scale of each layer",
                      served("kv_scale"))  # fmt: skip
        return
    attention = {
        index
        for index, block in enumerate(sizes.blocks)
        if any(cache.heads and cache.numbers for cache in block.caches)
    }
    missing = []
    for part, other in (("k_scale", "v_scale"), ("v_scale", "k_scale")):
        for index in sorted((attention | scales[other].keys()) - scales[part].keys()):
            if scales[part]:
                like = next(iter(scales[part].values()))
                name = re.sub(r"(?<=layers\.)\d+", str(index), like, count=1)
            else:
                name = (
                    scales[other][index].replace(f"{other[0]}_proj", f"{part[0]}_proj").replace(other, part)
                )
            missing.append(name)
    if missing:
        yield Finding(
            "error", "is missing", tuple(missing), "a number, as other layers have", served("kv_scale")
        )


def settings_are_dynamic(config: Mapping[str, Any]) -> bool:
    """Whether quantization settings say that layers scale their inputs themselves, or leave the inputs as they are."""
    settings = quantization_settings(config)
    if not isinstance(settings, Mapping):
        return False
    if settings.get("activation_scheme") == "dynamic":
        return True
    groups = settings.get("config_groups")
    inputs = [
        group.get("input_activations") for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    ]  # fmt: skip
    return bool(inputs) and all(rounding is None or rounding.get("dynamic") is True for rounding in inputs)
