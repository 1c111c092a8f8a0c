"""The tensors of a folder of safetensors files, mapped and not loaded.

Only the header is parsed (8 bytes of length, then JSON), and checked: offsets must cover the file exactly.
So a torn file is found before anything is computed from it. Format:
https://github.com/huggingface/safetensors, version 0.x.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import CheckpointError
from pipeline.models.header import LONGEST_BYTES, HeaderEntry, parse_header
from pipeline.models.layer_names import bare_name
from pipeline.reading import UnreadableFile, open_file, read_json

Array = NDArray[Any]
DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}


class TensorKind(Protocol):
    """Name, type and shape of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str:
        """As the format spells it: "BF16", "F8_E4M3", …"""

    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorMap(Mapping[str, Array]):
    """Tensors by name; type and shape of each are known before it is read."""

    headers: Mapping[str, TensorKind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    @property
    def elements(self) -> int:
        """Numbers in all tensors together, as they are stored."""
        return sum(math.prod(header.shape) for header in self.headers.values())


class DecoderTensors(TensorMap):
    """Tensors of a decoder that is published with a tower for images, under the names that it has alone."""

    headers: dict[str, HeaderEntry]

    def __init__(self, files: TensorFiles) -> None:
        self._files = files
        self._names = {
            f"model.{bare_name(name)}".replace("model.lm_head.", "lm_head."): name
            for name in files.headers
            if not _TOWER.search(name)
        }
        self.headers = {
            name: replace(files.headers[stored], name=name) for name, stored in self._names.items()
        }

    def __getitem__(self, name: str) -> Array:
        return self._files[self._names[name]]


_TOWER = re.compile(r"(^|\.)(vision_tower|multi_modal_projector)\.")


class TensorFiles(TensorMap):
    """The tensors (read-only, mapped) of all files of a folder that match `pattern`."""

    headers: dict[str, HeaderEntry]

    def __init__(self, directory: Path, pattern: str = "*.safetensors") -> None:
        """Read the headers of all files; the values of a tensor are read when it is used.

        Raises:
            CheckpointError: no file matches, one is damaged, two hold the same tensor, or the index names
                a tensor that no file holds.
            UnreadableFile: a file cannot be opened.
        """
        self.directory = directory
        self.headers = {}
        files = sorted(directory.glob(pattern))
        if not files:
            raise CheckpointError(f"{directory} holds no {pattern} file")
        for file in files:
            for header in read_headers(file):
                if header.name in self.headers:
                    raise CheckpointError(
                        f"{header.name} is in both {self.headers[header.name].file.name} and {file.name}"
                    )
                self.headers[header.name] = header
        self._check_index()

    def __getitem__(self, name: str) -> Array:
        header = self.headers[name]
        if 0 in header.shape:
            return np.empty(header.shape, DTYPES[header.dtype])
        raw = np.memmap(
            header.file, np.uint8, mode="r", offset=header.begin, shape=(header.end - header.begin,)
        )
        return raw.view(DTYPES[header.dtype]).reshape(header.shape)

    def _check_index(self) -> None:
        index = self.directory / "model.safetensors.index.json"
        if not index.exists():
            return
        try:
            placed = read_json(index).get("weight_map")
        except UnreadableFile as error:
            raise CheckpointError(str(error)) from error
        if not isinstance(placed, dict):
            raise CheckpointError(f"{index}: has no weight_map, of names of tensors to files")
        absent = sorted(
            name
            for name, file in placed.items()
            if name not in self.headers or self.headers[name].file.name != file
        )
        if absent:
            raise CheckpointError(
                f"{index} names tensors that its files do not hold: {', '.join(absent[:8])}"
            )


def read_headers(file: Path) -> Iterator[HeaderEntry]:
    """Yield the headers of one file, checked against its size.

    Raises:
        CheckpointError: the file is damaged.
    """
    with open_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, LONGEST_BYTES):
            raise CheckpointError(f"{file} is not a safetensors file, or is cut short")
        entries = parse_header(stream.read(length), str(file))
    covered = 0
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{file}: {entry.name} has the unknown type {entry.dtype}")
        expected = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if entry.begin != covered or entry.end - entry.begin != expected:
            raise CheckpointError(
                f"{file}: the bytes of {entry.name} do not match its shape {list(entry.shape)}"
            )
        covered = entry.end
        yield replace(entry, file=file, begin=8 + length + entry.begin, end=8 + length + entry.end)
    if 8 + length + covered != size:
        raise CheckpointError(f"{file} is {size} bytes long, but its header describes {8 + length + covered}")
