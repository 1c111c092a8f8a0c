"""Faults of a published checkpoint, by the headers of its files and small reads of its scales, before it is served.

`lint` compares what config.json and hf_quant_config.json say (`ModelSizes`: every weight, its shape and its format)
with what the files hold, in a folder or read by ranges. Servers load many a damaged checkpoint without a word: a scale
that is absent is 1, and answers are noise. What has names that are not known is reported as not judged. Weights
themselves are not read; of scales, the smallest tensors first, up to a limit for each file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import CheckpointError
from pipeline.models.folder import CheckpointFolder
from pipeline.models.header import HeaderEntry, read_entries
from pipeline.models.sizes import ModelSizes
from pipeline.models.tensors import DTYPES
from pipeline.plan.lint.findings import Finding, Severity, index_findings, kv_findings, settings_are_dynamic
from pipeline.plan.lint.layers import LayerCheck
from pipeline.plan.lint.layouts import StoredTensors
from pipeline.reading import parse_json
from pipeline.sources.selection import INDEX, WHOLE

# Gives bytes of a file, by its name, first byte and end.
ReadPart = Callable[[str, int, int], bytes]
MOST_BYTES = 1 << 20  # of scales that are read of a file
_GAP = 1 << 12  # bytes between two tensors that are read at once

_NOISE = "what it scales is served as nothing, or as no number"


def scale_values(
    files: Mapping[str, Sequence[HeaderEntry]], is_scale: Callable[[str], bool], read: ReadPart | None
) -> Iterator[Finding]:
    """Yield what is wrong with the values of scales."""
    wrong: dict[tuple[Severity, str], list[str]] = defaultdict(list)
    unread: list[str] = []
    for file, entries in files.items():
        scales = [entry for entry in entries if is_scale(entry.name) and entry.dtype in DTYPES]
        if read is None:
            unread += [scale.name for scale in scales]
            continue
        places = _neighbours(_chosen(scales))
        chosen = {scale.name for together in places for scale in together}
        unread += [scale.name for scale in scales if scale.name not in chosen]
        for together in places:
            begin, end = together[0].begin, together[-1].end
            content = read(file, begin, end)
            for entry in together:
                part = content[entry.begin - begin : entry.end - begin]
                if len(part) < entry.end - entry.begin:
                    unread.append(entry.name)
                elif fault := _fault(np.frombuffer(part, DTYPES[entry.dtype])):
                    wrong[fault].append(entry.name)
    for (severity, problem), names in wrong.items():
        yield Finding(severity, problem, tuple(names), "positive numbers", _NOISE)
    if unread:
        yield Finding("not judged", "values of scales, which were not read", tuple(unread))


def _chosen(scales: Sequence[HeaderEntry]) -> list[HeaderEntry]:
    smallest, total = [], 0
    for entry in sorted(scales, key=lambda scale: scale.end - scale.begin):
        total += entry.end - entry.begin
        if total > MOST_BYTES:
            break
        if entry.end > entry.begin:
            smallest.append(entry)
    return smallest


def _neighbours(entries: Sequence[HeaderEntry]) -> list[list[HeaderEntry]]:
    groups: list[list[HeaderEntry]] = []
    for entry in sorted(entries, key=lambda entry: entry.begin):
        if groups and entry.begin - groups[-1][-1].end <= _GAP:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def _fault(values: NDArray[Any]) -> tuple[Severity, str] | None:
    if values.dtype.kind in "iub":  # exponents of 8 bits (E8M0): all are powers of two, but the last
        return ("error", "holds scales that are no numbers") if (values == 255).any() else None
    numbers = values.astype(np.float32)
    if np.isnan(numbers).any():
        return "error", "holds scales that are no numbers"
    if np.isinf(numbers).any():
        return "error", "holds scales that are infinite"
    if not numbers.any():
        return "error", "is zero" if numbers.size == 1 else "holds nothing but zeros"
    if (numbers < 0).any():
        return "error", "holds scales that are negative"
    return ("warning", "holds zeros") if (numbers == 0).any() else None


_CONFIG, _QUANTIZATION = "config.json", "hf_quant_config.json"


def lint(
    sizes: ModelSizes,
    files: Mapping[str, Sequence[HeaderEntry]],
    *,
    index: Mapping[str, str] | None = None,
    dynamic_inputs: bool = False,
    read: ReadPart | None = None,
) -> tuple[Finding, ...]:
    """Compare the description of a checkpoint with the headers of its files.

    Args:
        files: File -> its tensors, with places from the start of the file (`read_entries`).
        index: Tensor -> file, by model.safetensors.index.json; None: there is none.
        dynamic_inputs: Whether the settings say that layers scale their inputs themselves.
        read: Gives bytes of a file, by its name, first byte and end; None: values of scales are not judged.

    Returns:
        Errors first, then warnings, then what could not be judged.
    """
    stored = StoredTensors({entry.name: entry for entries in files.values() for entry in entries})
    findings = [
        *index_findings(files, index),
        *LayerCheck(sizes, stored, dynamic_inputs).findings(),
        *kv_findings(sizes, stored),
        *scale_values(files, stored.is_scale, read),
    ]
    return tuple(sorted(findings, key=lambda finding: get_args(Severity).index(finding.severity)))


class CheckpointFiles(Protocol):
    """Files of a checkpoint, of which parts are read."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """File -> bytes."""

    def part(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes of a file; fewer where it ends, or where no more are to be read."""


@dataclass(frozen=True)
class LocalFiles:
    """Files of a folder."""

    folder: CheckpointFolder

    @property
    def sizes(self) -> Mapping[str, int]:
        """File -> bytes."""
        names = (name for name in self.folder.names if name.endswith((".json", ".safetensors")))
        return {name: (self.folder.path / name).stat().st_size for name in names}

    def part(self, name: str, begin: int, end: int) -> bytes:
        """Return bytes of a file; fewer where it ends."""
        with self.folder.open(name) as stream:
            stream.seek(begin)
            return stream.read(end - begin)


def lint_folder(path: Path) -> tuple[Finding, ...] | None:
    """Judge a checkpoint in a folder; None where it holds no safetensors, or its config.json cannot be read.

    Raises:
        InvalidInput: a link leads out of the folder.
        UnreadableFile: a file cannot be read.
    """
    return lint_files(LocalFiles(CheckpointFolder(path)))


def lint_files(files: CheckpointFiles, *, quantized_only: bool = False) -> tuple[Finding, ...] | None:
    """Judge a checkpoint by headers and small reads.

    Args:
        quantized_only: Leave out checkpoints that are not quantized.

    Returns:
        Findings; None where there are no safetensors, config.json is not that of a decoder that is known, or the
        checkpoint is left out.

    Raises:
        UnreadableFile: a file of settings cannot be read.
    """
    present = files.sizes
    config = _json(files, present, _CONFIG)
    sizes = ModelSizes.from_config(config, _json(files, present, _QUANTIZATION) or None)
    if sizes is None or not any(name in present for name in (WHOLE, INDEX)):
        return None
    if quantized_only and not sizes.stored_formats:
        return None
    index: Mapping[str, str] | None = None
    if WHOLE not in present:
        weight_map = _json(files, present, INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping) or not all(
            isinstance(file, str) for file in weight_map.values()
        ):
            return (Finding("error", "has no weight_map, of names of tensors to files", (INDEX,)),)
        index = weight_map
    names = sorted(set(index.values())) if index is not None else [WHOLE]
    if absent := tuple(name for name in names if name not in present):
        problem = "is named by the index, and is not there"
        return (Finding("error", problem, absent, "a file", "servers refuse it"),)
    entries: dict[str, list[HeaderEntry]] = {}
    damaged: list[Finding] = []
    for name in names:
        try:
            entries[name] = read_entries(name, lambda file, size: files.part(file, 0, size))
        except CheckpointError as error:
            damaged.append(Finding("error", str(error), (name,)))
            continue
        end = max((entry.end for entry in entries[name]), default=present[name])
        if end != present[name]:
            problem = f"is {present[name]} bytes long"
            damaged.append(Finding("error", problem, (name,), f"{end}, by its header", "servers refuse it"))
    if damaged:
        return tuple(damaged)
    dynamic = settings_are_dynamic(config)
    return lint(sizes, entries, index=index, dynamic_inputs=dynamic, read=files.part)


def _json(files: CheckpointFiles, present: Mapping[str, int], name: str) -> dict[str, Any]:
    if name not in present:
        return {}
    header: dict[str, Any] = parse_json(files.part(name, 0, present[name]), name)
    return header
