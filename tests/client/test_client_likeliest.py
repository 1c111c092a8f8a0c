"""The likeliest tokens of each position, from logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client import Refused
from pipeline.client.likeliest import Likeliest
from pipeline.client.sampling import read_sampling

ROWS = st.lists(
    st.lists(st.floats(-30, 30, width=32), min_size=6, max_size=6), min_size=1, max_size=3
)  # [positions][vocabulary]


@given(rows=ROWS, count=st.integers(1, 9), temperature=st.floats(0.1, 3))
def test_they_are_the_greatest_of_the_softmax(
    rows: list[list[float]], count: int, temperature: float
) -> None:
    logits = np.array([[rows]], np.float32)
    told = Likeliest(count, temperature).read("FP32", logits.tobytes(), len(rows))
    assert len(told) == len(rows)
    for row, pairs in zip(rows, told, strict=True):
        weights = np.exp((np.array(row, np.float32).astype(float) - max(row)) / temperature)
        expected = sorted(enumerate(np.log(weights / weights.sum())), key=lambda pair: (-pair[1], pair[0]))
        assert [value for _, value in pairs] == pytest.approx(
            [value for _, value in expected[:count]], abs=1e-6
        )
        assert [row[id] for id, _ in pairs] == pytest.approx([row[id] for id, _ in expected[:count]])


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
