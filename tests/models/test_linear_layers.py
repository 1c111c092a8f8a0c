"""Packed weights: unpacking undoes packing, and what is dequantized is near what was quantized."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.models import CheckpointReader, Format
from pipeline.models.layers import LinearLayer, round_e4m3, unpack_e2m1, unpack_rows
from tests.support.models import make_checkpoint, quantize_checkpoint

INT4 = arrays(
    np.int8, st.tuples(st.integers(1, 5).map(lambda n: 2 * n), st.integers(1, 7)), elements=st.integers(-8, 7)
)


@given(INT4)
def test_unpacking_rows_undoes_packing(codes: np.ndarray) -> None:
    nibbles = codes.view(np.uint8) & 0x0F
    packed = nibbles[0::2] | (nibbles[1::2] << 4)
    assert (unpack_rows(packed) == codes).all()


def test_e2m1_codes_are_the_eight_values_and_their_negatives() -> None:
    every = np.arange(16, dtype=np.uint8)
    packed = (every[0::2] | (every[1::2] << 4)).reshape(1, 8)
    assert unpack_e2m1(packed)[0].tolist() == [
        0,
        0.5,
        1,
        1.5,
        2,
        3,
        4,
        6,
        -0.0,
        -0.5,
        -1,
        -1.5,
        -2,
        -3,
        -4,
        -6,
    ]


@given(arrays(np.float32, 16, elements=st.floats(-1e4, 1e4, width=32)), st.floats(1e-3, 1e3))
def test_e4m3_saturates_and_is_stable(values: np.ndarray, scale: float) -> None:
    rounded = round_e4m3(values, scale)
    assert np.isfinite(rounded).all()
    assert np.abs(rounded).max() <= 448 * np.float32(scale) * (1 + 1e-6)
    np.testing.assert_allclose(round_e4m3(rounded, scale), rounded, rtol=1e-6)


@pytest.mark.parametrize(
    ("form", "limit"), [("fp8", 0.04), ("int4_awq", 0.15), ("w4a8_awq", 0.16), ("int8_sq", 0.02)]
)
def test_dequantized_weights_are_near_the_source(tmp_path: Path, form: str, limit: float) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1, hidden=128, heads=2, kv_heads=1, intermediate=192)
    exported = CheckpointReader(quantize_checkpoint(source, tmp_path / form, form))
    assert exported.faults() == []
    original = CheckpointReader(source)
    for shape in original.architecture.linears():
        layer = exported.linear(shape.name)
        assert layer.shape == (shape.rows, shape.columns)
        weight = layer.dequantize()
        if layer.pre_quant_scale is not None:
            weight = weight * layer.pre_quant_scale.astype(np.float32)
        wanted = original.linear(shape.name).dequantize()
        assert np.sqrt(np.mean((weight - wanted) ** 2)) < limit * wanted.std(), shape.name


def test_nvfp4_has_two_levels_of_scales() -> None:
    weight = np.array([[0x21, 0x0F] + [0] * 6], np.uint8)  # 0.5, 1, -6, 0, …
    layer = LinearLayer(
        "x",
        Format.NVFP4,
        weight,
        weight_scale=np.array([[2.0]], ml_dtypes.float8_e4m3fn),
        weight_scale_2=np.array(0.25, np.float32),
        group_size=16,
    )
    assert layer.shape == (1, 16)
    assert layer.dequantize()[0, :4].tolist() == [0.25, 0.5, -3.0, 0.0]
