"""Tensors as bytes: what goes in comes out, and tritonclient agrees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from pipeline.client.tensors import decode_bytes, decode_numbers, encode


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_bytes_survive(values: list[bytes]) -> None:
    assert decode_bytes(encode("BYTES", values)) == values


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5))
def test_bytes_are_those_of_tritonclient(values: list[bytes]) -> None:
    array = np.array(values, dtype=object)
    assert encode("BYTES", values) == serialize_byte_tensor(array).item()
    assert list(deserialize_bytes_tensor(encode("BYTES", values))) == values


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [("INT32", np.int32), ("UINT64", np.uint64), ("FP32", np.float32), ("BOOL", np.bool_)],
)
def test_numbers_are_those_of_numpy(datatype: str, dtype: type) -> None:
    array = np.array([0, 1, 1, 0], dtype=dtype)
    assert encode(datatype, array.tolist()) == array.tobytes()
    assert list(decode_numbers(datatype, array.tobytes())) == array.tolist()


def test_cut_bytes_are_noticed() -> None:
    with pytest.raises(ValueError, match="element of 9 bytes"):
        decode_bytes(b"\x09\0\0\0abc")
