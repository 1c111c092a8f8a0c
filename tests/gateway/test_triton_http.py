"""JSON that goes to Triton: how deep it is, and that what was read is what is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gateway.errors import ApiError
from pipeline.gateway.triton_http import JsonDepth, TritonHttpLimits, rewritten

LIMITS = TritonHttpLimits(body_bytes=2**20, depth=20, parts=10_000)
texts = st.text(st.characters(codec="utf-8")) | st.sampled_from(['"', "\\", '\\"[', "]}", "{[" * 30])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=10,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def feed(text: bytes, sizes: list[int], most: int) -> None:
    reading, position, turn = JsonDepth(TritonHttpLimits(depth=most)), 0, 0
    while position < len(text):
        size = sizes[turn % len(sizes)]
        reading.feed(text[position : position + size])
        position, turn = position + size, turn + 1


@given(value=values, ascii=st.booleans(), sizes=st.lists(st.integers(1, 50), min_size=1))
def test_depth_is_that_of_the_value(value: Any, ascii: bool, sizes: list[int]) -> None:
    text, found = json.dumps(value, ensure_ascii=ascii).encode(), depth(value)
    feed(text, sizes, found)
    if found:
        with pytest.raises(ApiError, match="nested deeper"):
            feed(text, sizes, found - 1)


@given(value=values)
def test_what_is_written_is_what_was_read(value: Any) -> None:
    assert json.loads(rewritten(json.dumps(value).encode(), LIMITS)) == value


@pytest.mark.parametrize(
    "text", [b"[", b"NaN", b'{"a": Infinity}', b"1e999", b'"\\ud800"', b'"\xff"', b"{} {}"]
)
def test_what_parsers_may_read_in_two_ways_is_refused(text: bytes) -> None:
    with pytest.raises(ApiError, match="is not JSON"):
        rewritten(text, LIMITS)


def test_of_two_equal_keys_triton_sees_the_one_that_was_read() -> None:
    twice = b'{"inputs": [{"shape": [1099511627776]}], "inputs": [{"shape": [1]}]}'
    assert json.loads(rewritten(twice, LIMITS)) == {"inputs": [{"shape": [1]}]}
    assert rewritten(twice, LIMITS).count(b"inputs") == 1


@pytest.mark.parametrize("shape", [[1, 1 << 40], [1 << 62, 4], [-1, 5], [2**18]])
def test_shapes_are_held_to_the_size_of_bodies(shape: list[int]) -> None:
    with pytest.raises(ApiError, match="too large"):
        rewritten(json.dumps({"inputs": [{"name": "max_tokens", "shape": shape}]}).encode(), LIMITS)


def test_classes_are_refused_and_many_parts() -> None:
    asked = {"outputs": [{"name": "text_output", "parameters": {"classification": 1 << 40}}]}
    with pytest.raises(ApiError, match="classes"):
        rewritten(json.dumps(asked).encode(), LIMITS)
    with pytest.raises(ApiError, match="10000 texts, lists and objects"):
        JsonDepth(LIMITS).feed(b"[" + b"[]," * 10_001)
    with pytest.raises(ApiError, match="10000 texts, lists and objects"):
        JsonDepth(LIMITS).feed(b"[" + b'"",' * 10_001)
