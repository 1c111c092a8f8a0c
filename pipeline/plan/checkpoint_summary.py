"""Published checkpoints read from their folders: parameters, bytes by format, and what they keep of a sequence.

Each figure stands beside the one that is published, where there is one: `total_size` of the checkpoint's index, or what
its name says ("Qwen3-235B-A22B"). Where files of weights are there, their headers and scales are judged, too
(`pipeline.plan.lint`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import Fault, InvalidInput
from pipeline.models.blocks import Cache, CacheKind
from pipeline.models.sizes import ModelSizes, config_faults
from pipeline.plan.lint import Finding, lint_folder
from pipeline.plan.memory.tensors import (
    active_parameters,
    cache_state_bytes,
    cache_token_bytes,
    parameter_counts,
    published_bytes_by_format,
)
from pipeline.reading import UnreadableFile, optional_json, read_json

CONFIG, QUANTIZATION, INDEX = "config.json", "hf_quant_config.json", "model.safetensors.index.json"
# "235B-A22B", "70B", "8x7B"; not "17B-16E", which says what is active
_NAMED = re.compile(r"(?<![\w.])(?:(\d+)x)?(\d+(?:\.\d+)?)([BT])(?:-A(\d+(?:\.\d+)?)B)?(?![\w.]|-\d+E)")
_UNITS = {"B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """Bytes that layers of one kind keep of a sequence.

    Attributes:
        layers: Number of layers.
        token_bytes: Bytes of a token in all of them.
        sequence_bytes: Bytes whatever the length of the sequence, in all of them.
        window: Tokens that are seen; 0: all.
    """

    kind: CacheKind
    layers: int
    token_bytes: float
    sequence_bytes: int
    window: int


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """One checkpoint; without `sizes` it is refused, and `faults` say why.

    Attributes:
        index_bytes: `total_size` of its index; None where there is none.
        findings: Faults of its files; None where they are not there, so that nothing was judged.
    """

    name: str
    sizes: ModelSizes | None
    faults: tuple[Fault, ...] = ()
    index_bytes: int | None = None
    findings: tuple[Finding, ...] | None = None

    @property
    def is_broken(self) -> bool:
        """Whether it cannot be read, or its files have errors."""
        return self.sizes is None or any(finding.severity == "error" for finding in self.findings or ())

    @property
    def kv_cache(self) -> str:
        """Type of keys and values: as the checkpoint asks, or that of its weights."""
        assert self.sizes is not None, "the caller looked"
        return self.sizes.kv_cache or self.sizes.dtype

    @property
    def bytes_by_format(self) -> Mapping[str, int]:
        """Bytes of the files' weights by format, layers that predict further tokens included."""
        assert self.sizes is not None, "the caller looked"
        return published_bytes_by_format((*self.sizes.weights(), *self.sizes.draft), self.sizes.dtype)

    @property
    def caches(self) -> tuple[LayerCaches, ...]:
        """Bytes that each kind of layers keeps, on one GPU."""
        assert self.sizes is not None, "the caller looked"
        caches_by_kind: dict[tuple[CacheKind, int], list[Cache]] = {}
        for block in self.sizes.blocks:
            for cache in block.caches:
                caches_by_kind.setdefault((cache.kind, cache.window), []).append(cache)
        return tuple(
            LayerCaches(
                kind,
                len(caches),
                sum(cache_token_bytes(cache, self.kv_cache) for cache in caches),
                sum(cache_state_bytes(cache, self.kv_cache) for cache in caches),
                window,
            )
            for (kind, window), caches in caches_by_kind.items()
        )

    def document(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
        if self.sizes is None:
            return {"name": self.name, "faults": [str(fault) for fault in self.faults]}
        named, active = named_parameters(self.name)
        counts = parameter_counts(self.sizes)
        return {
            "name": self.name,
            "architecture": self.sizes.architecture,
            "parameters": {
                "total": sum(counts.values()), "active": active_parameters(self.sizes), "vision": counts["vision"],
                "draft": sum(weight.parameters for weight in self.sizes.draft),
                "named": named, "named_active": active,
            },
            "weights": {
                "by_format": dict(self.bytes_by_format), "bytes": sum(self.bytes_by_format.values()),
                "index_bytes": self.index_bytes,
            },
            "kv_cache": {
                "type": self.kv_cache,
                "token_bytes": sum(cache.token_bytes for cache in self.caches),
                "sequence_bytes": sum(cache.sequence_bytes for cache in self.caches),
                "layers": [asdict(cache) for cache in self.caches],
            },
            "findings": None if self.findings is None else [asdict(finding) for finding in self.findings],
        }  # fmt: skip


def named_parameters(name: str) -> tuple[int | None, int | None]:
    """Return the parameters that a name states, in all and active.

    >>> named_parameters("Qwen/Qwen3-235B-A22B")
    (235000000000, 22000000000)
    >>> named_parameters("meta-llama/Llama-4-Scout-17B-16E")
    (None, None)
    """
    match = _NAMED.search(name)
    if match is None or match[1]:
        return None, None
    return int(float(match[2]) * _UNITS[match[3]]), int(float(match[4]) * 10**9) if match[4] else None


def summaries(paths: Sequence[Path]) -> tuple[CheckpointSummary, ...]:
    """Read checkpoints, each a folder with a config.json, or a folder of such folders.

    Raises:
        InvalidInput: a folder holds neither.
    """
    checkpoints: list[CheckpointSummary] = []
    faults: list[Fault] = []
    for path in paths:
        folders = list(_folders(path))
        checkpoints += map(summarize, folders)
        faults += [] if folders else [Fault(f"holds no {CONFIG}, nor folders that do", where=str(path))]
    if faults:
        raise InvalidInput("No checkpoints", faults)
    return tuple(checkpoints)


def _folders(path: Path) -> Iterator[Path]:
    if (path / CONFIG).is_file():
        yield path
    elif path.is_dir():
        yield from sorted(folder for folder in path.iterdir() if (folder / CONFIG).is_file())


def summarize(folder: Path) -> CheckpointSummary:
    """Read one checkpoint's folder. Repositories of the Hub are recognised by "org--name", as its cache writes them."""
    name = folder.resolve().name.removeprefix("models--").replace("--", "/")
    try:
        config = read_json(folder / CONFIG)
        beside = read_json(folder / QUANTIZATION) if (folder / QUANTIZATION).exists() else None
        index = optional_json(folder / INDEX)
    except UnreadableFile as error:
        return CheckpointSummary(name, None, (error.fault,))
    if faults := config_faults(config, beside):
        where = str(folder / CONFIG)
        return CheckpointSummary(name, None, tuple(replace(fault, where=where) for fault in faults))
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    is_number = isinstance(size, int) and not isinstance(size, bool)
    try:
        findings = lint_folder(folder)
    except UnreadableFile as error:
        return CheckpointSummary(name, None, (error.fault,))
    except InvalidInput as error:
        return CheckpointSummary(name, None, tuple(error.faults))
    return CheckpointSummary(
        name,
        ModelSizes.from_config(config, beside),
        index_bytes=size if is_number else None,
        findings=findings,
    )
