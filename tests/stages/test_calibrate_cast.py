"""MXFP4 weights cast to NVFP4: the same numbers, but for blocks that are too small to be told beside the largest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.errors import UserError
from pipeline.models import CheckpointReader, Format, TensorFiles
from pipeline.progress import Silent
from pipeline.stages.calibrate.calibration import calibrate
from pipeline.stages.evaluate.decoder import Decoder
from tests.support.calibrated import quantization
from tests.support.compressed import compressed_checkpoint
from tests.support.models import make_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    plain = make_checkpoint(tmp_path / "plain", layers=1, hidden=64, heads=2, kv_heads=1, intermediate=128)
    return compressed_checkpoint(plain, tmp_path / "source", "mxfp4a16")


def cast(source: Path, into: Path) -> dict[str, object]:
    into.mkdir()
    return calibrate(
        source, into, quantization("w4a16_nvfp4"), exports=(), into=into, progress=Silent(), device="cpu"
    )


def test_the_model_is_the_same_to_the_last_bit(source: Path, tmp_path: Path) -> None:
    facts = cast(source, tmp_path / "into")
    before, after = CheckpointReader(source), CheckpointReader(tmp_path / "into/hf")
    weights = sum(shape.rows * shape.columns for shape in before.architecture.linears())
    assert facts["cast"] == {"blocks": weights // 32, "inexact_blocks": 0}
    assert (after.faults(), after.quantization.format) == ([], Format.W4A16_NVFP4)
    for shape in before.architecture.linears():
        np.testing.assert_array_equal(
            after.linear(shape.name).dequantize(), before.linear(shape.name).dequantize()
        )
    text = [[5, 9, 200, 31, 7, 77]]
    one, other = (
        Decoder(model, text, "cpu").hidden_states(lambda: None).numpy() for model in (before, after)
    )
    np.testing.assert_array_equal(one, other)
    scales = {after.linear(f"model.layers.0.self_attn.{part}_proj").weight_scale_2.item() for part in "qkv"}  # type: ignore[union-attr]
    assert len(scales) == 1


def test_blocks_far_below_the_largest_are_rounded_and_counted(source: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    tensors = {key: np.array(value) for key, value in TensorFiles(source).items()}
    tensors[f"{name}.weight_scale"][0, 0] = 130
    tensors[f"{name}.weight_scale"][1, :3] = (130 - 17, 130 - 18, 130 - 30)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert cast(source, tmp_path / "into")["cast"]["inexact_blocks"] == 2  # type: ignore[index]
    before, after = (
        CheckpointReader(one).linear(name).dequantize() for one in (source, tmp_path / "into/hf")
    )
    np.testing.assert_array_equal(after[2:], before[2:])
    np.testing.assert_array_equal(after[1, :32], before[1, :32])
    assert (
        np.abs(after - before).max() <= 2.0 ** (3 - 17) / 4
    )  # half a step of the smallest scale that can be told


def test_other_formats_are_not_quantized_twice(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is quantized already"):
        calibrate(
            source, tmp_path, quantization("fp8"), exports=(), into=tmp_path, progress=Silent(), device="cpu"
        )
