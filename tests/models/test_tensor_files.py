"""Safetensors read by our own reader: as the reference library does, and nothing torn gets through."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pipeline.errors import CheckpointError
from pipeline.models import TensorFiles

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int64, ml_dtypes.float8_e4m3fn)


def write(path: Path, header: dict[str, object], payload: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=5
    )
)
def test_what_the_library_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, parts: list) -> None:
    folder = tmp_path_factory.mktemp("tensors")
    random = np.random.default_rng(0)
    tensors = {
        f"t{n}": random.integers(0, 100, shape).astype(dtype) for n, (shape, dtype) in enumerate(parts)
    }
    save_file(tensors, folder / "model.safetensors")
    read = TensorFiles(folder)
    assert set(read) == set(tensors)
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        assert read[name].shape == value.shape
        assert read[name].tobytes() == value.tobytes()


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_file_that_is_cut_short_is_found(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones((4, 4), np.float32)}, file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        TensorFiles(tmp_path)


def test_bytes_after_the_last_tensor_are_found(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones(4, np.float32)}, file)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="header describes"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "do not match its shape"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "do not match its shape"),
        ({"dtype": "Q3", "shape": [8], "data_offsets": [0, 8]}, "unknown type Q3"),
    ],
)
def test_headers_that_lie_are_found(tmp_path: Path, entry: dict, message: str) -> None:
    write(tmp_path / "model.safetensors", {"a": entry}, bytes(8))
    with pytest.raises(CheckpointError, match=message):
        TensorFiles(tmp_path)


def test_no_file_and_the_same_tensor_twice(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no"):
        TensorFiles(tmp_path)
    for name in ("one", "two"):
        save_file({"a": np.ones(2, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="in both"):
        TensorFiles(tmp_path)


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model-00001-of-00001.safetensors")
    placed = {"a": "model-00001-of-00001.safetensors", "b": "model-00001-of-00001.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(CheckpointError, match=": b"):
        TensorFiles(tmp_path)
