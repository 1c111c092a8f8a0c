"""Faults of a published checkpoint, by the headers of its files and small reads of its scales, before it is served.

`lint` compares what config.json and hf_quant_config.json say (`ModelSizes`: every weight, its shape and its format)
with what the files hold, in a folder or read by ranges. Servers load many a damaged checkpoint without a word: a scale
that is absent is 1, and answers are noise. What has names that are not known is reported as not judged. Weights
themselves are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from pipeline.errors import CheckpointError
from pipeline.models.folder import CheckpointFolder
from pipeline.models.header import HeaderEntry, read_entries
from pipeline.models.sizes import ModelSizes
from pipeline.plan.lint.findings import Finding, Severity, index_findings, kv_findings, settings_are_dynamic
from pipeline.plan.lint.layers import LayerCheck
from pipeline.plan.lint.layouts import StoredTensors
from pipeline.plan.lint.scales import ReadPart, scale_values
from pipeline.reading import parse_json
from pipeline.sources.selection import INDEX, WHOLE

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
