"""Rounding, packing and rotary frequencies, against the implementations that define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
import openvino.opset15 as ops
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeline.models import Rope
from pipeline.runtimes.cpu.engine.paged_model import signal_stack_kept
from pipeline.runtimes.cpu.ir.nodes import Node, quantize_int8, round_e4m3, round_int8
from pipeline.runtimes.cpu.ir.weights import Constants
from tests.support.models import LLAMA3_SCALING

pytestmark = pytest.mark.models

SCALE = 0.25  # a power of two, so that the reference has no rounding of its own
VALUES = arrays.arrays(
    np.float32, st.integers(1, 200), elements=st.floats(-200, 200, width=32, allow_subnormal=False)
)


def _compile(operation: Callable[[Node, float], Node]) -> Any:
    x = ops.parameter(ov.PartialShape([-1]), ov.Type.f32)
    model = ov.Model([ops.result(operation(x, SCALE))], [x])
    with signal_stack_kept():
        return ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


@pytest.fixture(scope="module")
def e4m3() -> Any:
    return _compile(round_e4m3)


@pytest.fixture(scope="module")
def int8() -> tuple[Any, Any]:
    return _compile(round_int8), _compile(quantize_int8)


def _e4m3_reference(values: np.ndarray) -> np.ndarray:
    ratio = np.clip(values / np.float32(SCALE), -448, 448)
    return ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(SCALE)


def test_e4m3_at_every_number_and_every_tie(e4m3: Any) -> None:
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    ties = (every[1:] + every[:-1]) / 2
    beside = [np.nextafter(ties, np.float32(side)) for side in (-1e9, 1e9)]
    values = np.concatenate([every, ties, *beside, np.float32([449, 480, 1e6, -1e6])]) * np.float32(SCALE)
    np.testing.assert_array_equal(e4m3([values])[0], _e4m3_reference(values))


@given(values=VALUES)
def test_e4m3_at_any_number(e4m3: Any, values: np.ndarray) -> None:
    np.testing.assert_array_equal(e4m3([values])[0], _e4m3_reference(values))


@given(values=VALUES)
def test_int8_rounds_to_even_and_saturates(int8: tuple[Any, Any], values: np.ndarray) -> None:
    by_rounding, by_fake_quantization = int8
    expected = np.clip(np.round(values / SCALE), -128, 127).astype(np.float32) * np.float32(SCALE)
    np.testing.assert_array_equal(by_rounding([values])[0], expected)
    # OpenVINO's form shifts by 128 first; only a value next to a tie can fall on the other side.
    fake = by_fake_quantization([values])[0]
    near_tie = np.abs(np.abs(values / SCALE) % 1 - 0.5) < 1e-4
    np.testing.assert_allclose(fake[~near_tie], expected[~near_tie], atol=1e-5)
    assert np.abs(fake - expected).max() < 1.01 * SCALE


@given(
    codes=arrays.arrays(
        np.int8,
        st.tuples(st.integers(1, 6), st.integers(1, 4).map(lambda n: 16 * n)),
        elements=st.integers(-8, 7),
    ),
    group_size=st.sampled_from([2, 8, 16]),
)
@settings(max_examples=30)
def test_int4_is_read_back(codes: np.ndarray, group_size: int) -> None:
    constants = Constants()
    node = ops.convert(constants.add_int4(codes, group_size, "x.q_proj.weight"), ov.Type.f32)
    with signal_stack_kept():
        compiled = ov.Core().compile_model(ov.Model([ops.result(node)], []), "CPU")
    np.testing.assert_array_equal(compiled([])[0].reshape(codes.shape), codes)
    assert constants.census() == {"q_proj": {"precision": "i4", "bytes": codes.size // 2}}


@given(
    theta=st.sampled_from([10_000.0, 500_000.0, 1e6]),
    head_dim=st.sampled_from([32, 64, 128]),
    factor=st.floats(1, 32, width=32),
    context=st.sampled_from([64, 256, 8192]),
    kind=st.sampled_from(["default", "linear", "llama3"]),
)
def test_rotary_frequencies_equal_transformers(
    theta: float, head_dim: int, factor: float, context: int, kind: str
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling: dict[str, Any] = {
        "default": {},
        "linear": {"factor": factor},
        "llama3": {**LLAMA3_SCALING, "factor": factor, "original_max_position_embeddings": context},
    }[kind]
    parameters = {**scaling, "rope_theta": theta, "rope_type": kind}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=32768)
    make = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, attention_factor = make(config, "cpu")
    assert attention_factor == 1.0
    numbers = {key: float(value) for key, value in scaling.items() if key != "rope_type"}
    ours = Rope(theta, kind, numbers).inverse_frequencies(head_dim)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-5)
