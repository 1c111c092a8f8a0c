"""Figures from hidden states: against the definitions written out, and the roundings against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import StageError
from pipeline.models import Format
from pipeline.models.layers import round_e4m3 as round_e4m3_numpy
from pipeline.stages.evaluate.comparison import PositionScores, measure
from pipeline.stages.evaluate.decoder import round_e2m1, round_e4m3, round_input, round_nvfp4

pytestmark = pytest.mark.models

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SAMPLES = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


def figures(
    noise: float, seed: int = 0, samples: list[list[int]] = SAMPLES
) -> tuple[PositionScores, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(map(len, samples))
    hidden, head = torch.randn(rows, 8, generator=generator), torch.randn(10, 8, generator=generator)
    other = hidden + noise * torch.randn(rows, 8, generator=generator)
    return (
        measure(samples, (hidden, head), (other, head), lambda _: None),
        hidden @ head.T,
        other @ head.T,
    )


def test_figures_are_what_their_definitions_say() -> None:
    found, first, second = figures(0.5)
    at, row = 0, 0
    for number, sample in enumerate(SAMPLES):
        for place in range(1, len(sample)):
            p, q = (logits[row + place - 1].double().softmax(0).tolist() for logits in (first, second))
            assert (found.sample[at], found.position[at]) == (number, place)
            assert found.reference_loss[at] == pytest.approx(-math.log(p[sample[place]]), rel=1e-4)
            assert found.quantized_loss[at] == pytest.approx(-math.log(q[sample[place]]), rel=1e-4)
            kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            assert found.kl[at] == pytest.approx(kl, rel=1e-3, abs=1e-6)
            assert found.reference_best[at] == p.index(max(p))
            assert found.quantized_probability[at] == pytest.approx(max(q), rel=1e-4)
            at += 1
        row += len(sample)
    assert at == len(found.kl)


def test_the_same_model_twice_is_no_difference_at_all() -> None:
    found, _, _ = figures(0.0)
    increase, agreement, kl = found.estimates()
    assert (increase.value, increase.low, increase.high) == (0, 0, 0)
    assert (agreement.value, kl.value) == (1, 0)
    assert found.histogram().below == len(found.kl)


def test_estimates_are_of_all_positions_and_lie_in_their_interval() -> None:
    random = np.random.default_rng(1)
    samples = [random.integers(0, 10, size=random.integers(2, 30)).tolist() for _ in range(40)]
    found, _, _ = figures(0.7, samples=samples)
    increase, agreement, kl = found.estimates()
    ratio = np.exp(found.quantized_loss.mean()) / np.exp(found.reference_loss.mean())
    assert increase.value == pytest.approx(ratio - 1)
    assert agreement.value == pytest.approx((found.reference_best == found.quantized_best).mean())
    assert kl.value == pytest.approx(found.kl.mean())
    for estimate in (increase, agreement, kl):
        assert estimate.low < estimate.value < estimate.high
    assert found.estimates() == (increase, agreement, kl)  # resampling is seeded


def test_the_histogram_counts_every_position() -> None:
    histogram = figures(2.0)[0].histogram()
    assert sum(histogram.counts) + histogram.below == len(figures(2.0)[0].kl)
    assert len(histogram.edges) == len(histogram.counts) + 1


def test_a_model_that_computes_no_numbers_is_found() -> None:
    hidden, head = torch.ones(15, 8), torch.ones(10, 8)
    with pytest.raises(StageError, match="not finite"):
        measure(SAMPLES, (hidden, head), (hidden * math.nan, head), lambda _: None)


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=20))
def test_e2m1_takes_the_nearest_value(values: list[float]) -> None:
    for value, got in zip(values, round_e2m1(torch.tensor(values)).tolist(), strict=True):
        size = min(abs(value), 6.0)
        assert abs(abs(got) - size) == pytest.approx(min(abs(entry - size) for entry in E2M1), abs=1e-6)
        assert got == 0 or (got > 0) == (value > 0)


def test_e2m1_ties_go_to_even_codes() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert round_e2m1(torch.tensor(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@settings(max_examples=30)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), st.floats(1e-2, 10))
def test_both_e4m3_roundings_are_the_same(values: list[float], scale: float) -> None:
    ours = round_e4m3(torch.tensor(values), scale).numpy()
    np.testing.assert_allclose(ours, round_e4m3_numpy(np.array(values, np.float32), scale), rtol=1e-6)


def test_int8_inputs_keep_their_full_range() -> None:
    x = torch.tensor([-200.0, -128.4, -1.5, 0.4, 127.6])
    assert round_input(x, Format.INT8_SQ, 1.0).tolist() == [-128, -128, -2, 0, 127]
    assert round_input(x, Format.INT4_AWQ, 1.0) is x


# ModelOpt warns when it is imported for the first time.
@pytest.mark.filterwarnings("ignore")
def test_nvfp4_is_as_modelopt_describes_it() -> None:
    """Against ModelOpt's own quantization of a tensor, which needs no GPU."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    scale = x.abs().max() / (448 * 6)
    stored, block_scale, double_scale = NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=scale)
    wanted = stored.dequantize(
        dtype=torch.float32, scale=block_scale, double_scale=double_scale, block_sizes={-1: 16}
    )
    torch.testing.assert_close(round_nvfp4(x, float(scale)), wanted, rtol=1e-5, atol=1e-6)
