"""Layers of compressed-tensors, dequantized as its own library does it (recorded: tests/support/compressed.py)."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.errors import CheckpointError
from pipeline.models import CheckpointReader, TensorFiles
from pipeline.models.architecture import LinearShape
from pipeline.models.compressed import unpack
from pipeline.models.quantization import CheckpointQuantization
from tests.support.compressed import COLUMNS, RECORDED, ROWS, SCHEMES, compressed_checkpoint
from tests.support.models import make_checkpoint

LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_those_of_the_library(tmp_path: Path, scheme: str) -> None:
    recorded = TensorFiles(RECORDED.parent)
    parts = {
        name.partition("/")[2]: value for name, value in recorded.items() if name.startswith(f"{scheme}/")
    }
    expected = parts.pop("expected")
    settings = SCHEMES[scheme]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}), encoding="utf-8")
    how = CheckpointQuantization.read(tmp_path).stored(LAYER)
    layer = unpack(LAYER, LinearShape(LAYER, ROWS, COLUMNS, False), how, parts)
    assert layer.shape == (ROWS, COLUMNS)
    # The library multiplies in the type of the scales, or in bfloat16.
    weight = layer.dequantize().astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_read_whole_and_its_faults_are_named(tmp_path: Path, scheme: str) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1, hidden=64, heads=2, kv_heads=1, intermediate=128)
    folder = compressed_checkpoint(source, tmp_path / scheme, scheme)
    assert CheckpointReader(folder).faults() == []
    tensors = {name: np.array(value) for name, value in TensorFiles(folder).items()}
    del tensors[f"{LAYER}.weight_scale"]
    save_file(tensors | {f"{LAYER}.weight_scale_2": np.ones(1, np.float32)}, folder / "model.safetensors")
    damaged = CheckpointReader(folder)
    assert damaged.faults()[:1] == [f"{LAYER}.weight_scale is missing"]
    assert f"{LAYER}.weight_scale_2 is not expected" in "\n".join(damaged.faults())
    with pytest.raises(CheckpointError, match="weight_scale is missing"):
        damaged.linear(LAYER)


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    settings = json.loads(json.dumps(SCHEMES["fp8"]))
    settings["config_groups"]["group_0"]["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="weights in fp8_block are not read"):
        CheckpointQuantization.read(tmp_path)
