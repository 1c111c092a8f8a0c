"""The likeliest tokens of each position, from logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client import Refused
from pipeline.client.sampling import read_sampling
from pipeline.client.top_logprobs import Likeliest


@given(
    seed=st.integers(0, 2**32),
    positions=st.integers(1, 3),
    vocabulary=st.integers(1, 6000),
    count=st.integers(1, 20),
    temperature=st.floats(0.1, 3),
)
def test_they_are_the_greatest_of_the_softmax(
    seed: int, positions: int, vocabulary: int, count: int, temperature: float
) -> None:
    """Rounded, so that many are equal: of those, the first come first."""
    logits = (
        np.random.default_rng(seed).normal(0, 4, (1, 1, positions, vocabulary)).round(1).astype(np.float32)
    )
    told = Likeliest(count, temperature).read("FP32", logits.tobytes(), positions)
    assert len(told) == positions
    for row, pairs in zip(logits[0, 0].astype(float), told, strict=True):
        order = np.lexsort((np.arange(vocabulary), -row))[:count]
        log_probs = row / temperature - np.logaddexp.reduce(row / temperature)
        assert [id for id, _ in pairs] == order.tolist()
        assert [value for _, value in pairs] == pytest.approx(log_probs[order], abs=1e-5)


def test_half_precision_is_read_as_such() -> None:
    (pairs,) = Likeliest(1).read("FP16", np.zeros((1, 1, 1, 4), np.float16).tobytes(), 1)
    assert pairs == ((0, pytest.approx(math.log(1 / 4))),)


def test_no_tokens_no_rows() -> None:
    assert Likeliest(3).read("FP32", b"", 0) == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "needs log_probs = True"),
        ({"log_probs": True, "presence_penalty": 0.5}, "cannot be told with presence_penalty = 0.5"),
        ({"log_probs": True, "bad_words": "x"}, "cannot be told with bad_words"),
        ({"log_probs": True, "guide_type": "json"}, "cannot be told with guide_type"),
    ],
)
def test_what_they_do_not_go_with(fields: dict[str, object], said: str) -> None:
    with pytest.raises(Refused, match=f"top_log_probs: {said}"):
        read_sampling({"top_log_probs": 3, **fields})
    read_sampling({"top_log_probs": 3, "log_probs": True, "presence_penalty": 0, "min_tokens": 0})
