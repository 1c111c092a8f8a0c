"""The ranks of a TensorRT-LLM checkpoint put together again, under the names of the Hugging Face layout.

What lies where is said by `layout`, which is read backwards here; what a layer's tensors mean, by `checkpoint.layers`,
as for any other checkpoint. So the files that engines are built from can be judged like the unified export.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contracts.checkpoint import CheckpointLayout, faults_of
from pipeline.errors import CheckpointError
from pipeline.models import Architecture, CheckpointQuantization, CheckpointReader, TensorFiles
from pipeline.models.tensors import DTYPES, Array, TensorMap
from pipeline.plan.parallelism import Parallelism
from pipeline.runtimes.tensorrt.checkpoint.config import SAFETENSORS_DTYPES as RANK_DTYPES
from pipeline.runtimes.tensorrt.checkpoint.config import stored_dtype
from pipeline.runtimes.tensorrt.checkpoint.layout import Part, Rank, Scale, parts

# Attention has one parameter for both (layers/attention.py: kv_cache_scaling_factor); these two are not read.
_UNREAD = (".k_cache_scaling_factor", ".v_cache_scaling_factor")


class RankCheckpoint(CheckpointReader):
    """A TensorRT-LLM checkpoint as a whole.

    An FP8 cache has one scale for keys and values, the one that the engine computes with.

    Args:
        directory: Holds config.json and a rank<N>.safetensors for each rank.
        architecture: Architecture of its source, against which the files are checked.

    Raises:
        CheckpointError: config.json cannot be read, or names a format that is not known.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self.directory, self.architecture = directory, architecture
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory} is not a TensorRT-LLM checkpoint: {error}") from error
        self.sizes = _sizes(config.get("mapping") or {})
        kept = tuple(shape.name for shape in architecture.linears() if shape.router)
        quantization = CheckpointQuantization.of(directory, config.get("quantization") or {})
        self.quantization = replace(quantization, excluded=("lm_head", *kept))

    @cached_property
    def tensors(self) -> TensorMap:  # type: ignore[override]
        """Tensors of all ranks, as one."""
        return _JoinedTensors(self.directory, self.architecture, self.sizes, self.quantization)

    def faults(self) -> list[str]:
        """Everything that makes it another checkpoint than trtllm-build reads."""
        layout = CheckpointLayout(
            self.architecture,
            RANK_DTYPES[stored_dtype(self.architecture)],
            self.quantization.format,
            self.quantization.group_size,
            "fp8" if self.quantization.kv_cache else "auto",
            self.sizes.tensor,
            self.sizes.pipeline,
            self.sizes.expert,
        )
        return faults_of(self.directory, layout)


def _sizes(mapping: Mapping[str, int]) -> Parallelism:
    return Parallelism(mapping.get("tp_size", 1), mapping.get("pp_size", 1), mapping.get("moe_ep_size", 1))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Place of a rectangle in a tensor."""

    rank: int
    tensor: str  # of the rank
    at: int  # its first row there, where experts are below each other
    rows: tuple[int, int]  # of the whole tensor; of a scalar, (0, 1)
    columns: tuple[int, int] | None  # None: a vector, or a scalar


@dataclass(frozen=True, slots=True)
class _PieceJoiner:
    """Put the pieces together."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]


class _JoinedTensors(TensorMap):
    """Read when asked for, a tensor at a time; where several ranks hold the same, they must agree."""

    headers: Mapping[str, _PieceJoiner]

    def __init__(
        self, directory: Path, model: Architecture, sizes: Parallelism, quantization: CheckpointQuantization
    ) -> None:
        self._directory = directory
        self._ranks = [TensorFiles(directory, f"rank{number}.safetensors") for number in range(sizes.world)]
        pieces: dict[str, list[_Piece]] = defaultdict(list)
        scalars: set[str] = set()
        for number in range(sizes.world):
            for part in parts(model, Rank(number, sizes), quantization):
                located = _of_scale(number, part) if isinstance(part, Scale) else _of_part(number, part)
                for name, piece in located:
                    pieces[name].append(piece)
                    if isinstance(part, Scale):
                        scalars.add(name)
        self.headers = {
            name: self._joined(name, tuple(parts), scalar=name in scalars) for name, parts in pieces.items()
        }

    def __getitem__(self, name: str) -> Array:
        joined = self.headers[name]
        whole = np.empty(joined.shape, DTYPES[joined.dtype])
        written: set[tuple[tuple[int, int], tuple[int, int] | None]] = set()
        for piece in joined.pieces:
            stored = self._ranks[piece.rank][piece.tensor]
            flat = stored.reshape(-1, stored.shape[-1]) if piece.columns else stored.reshape(-1)
            values = flat[piece.at : piece.at + piece.rows[1] - piece.rows[0]]
            place = (slice(*piece.rows), *([slice(*piece.columns)] if piece.columns else []))
            target = whole.reshape(1)[place] if whole.ndim == 0 else whole[place]
            if (piece.rows, piece.columns) not in written:
                written.add((piece.rows, piece.columns))
                target[...] = values
            elif not (target.view(np.uint8) == values.view(np.uint8)).all():
                file = f"rank{piece.rank}.safetensors"
                raise CheckpointError(
                    f"{self._directory}: {file} holds another {piece.tensor} than a rank before it"
                )
        return whole

    def _joined(self, name: str, pieces: tuple[_Piece, ...], *, scalar: bool) -> _PieceJoiner:
        dtype = self._ranks[pieces[0].rank].headers[pieces[0].tensor].dtype
        rows = max(piece.rows[1] for piece in pieces)
        columns = max((piece.columns[1] for piece in pieces if piece.columns), default=None)
        shape = () if scalar else (rows,) if columns is None else (rows, columns)
        return _PieceJoiner(name, dtype, shape, pieces)


def _of_part(rank: int, part: Part) -> Iterator[tuple[str, _Piece]]:
    """The slices of a part, which lie below each other."""
    at, matrix = 0, len(part.shape) > 1
    for piece in part.slices:
        columns = (piece.columns or (0, part.shape[-1])) if matrix else None
        for name in (piece.tensor, *piece.alike):
            yield name, _Piece(rank, part.name, at, piece.rows, columns)
        at += piece.rows[1] - piece.rows[0]


def _of_scale(rank: int, scale: Scale) -> Iterator[tuple[str, _Piece]]:
    """Each number of a tensor of scales is that of all in its group."""
    if scale.name.endswith(_UNREAD):
        return
    for at, group in enumerate(scale.groups):
        for name in group:
            yield name, _Piece(rank, scale.name, at, (0, 1), None)
