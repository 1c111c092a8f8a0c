"""The weights of a TensorRT-LLM checkpoint by plain arithmetic on the bytes of its files.

It shares nothing with the reader that it is held against: no code of `pipeline`, and only what NVIDIA's documentation
and export say of the layout.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def read(file: Path) -> dict[str, Floats | NDArray[np.int64]]:
    """All tensors of a safetensors file as numbers."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = _numbers(raw[begin:end], entry["dtype"]).reshape(entry["shape"])
    return tensors


def _numbers(raw: bytes, dtype: str) -> NDArray[np.float64] | NDArray[np.int64]:
    if dtype == "F32":
        return np.frombuffer(raw, "<f4").astype(np.float64)
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "F8_E4M3":
        return e4m3()[np.frombuffer(raw, np.uint8)]
    assert dtype == "I8"
    return np.frombuffer(raw, np.int8).astype(np.int64)


def e4m3() -> Floats:
    """[256]: a sign, four bits of exponent with bias 7, three of mantissa; no infinity, 0x7F is none."""
    values = np.empty(256)
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[code] = (-1 if code & 128 else 1) * (np.nan if code & 127 == 127 else size)
    return values


def rounded_e4m3(values: Floats, scale: float) -> Floats:
    """The nearest multiples; ties go to the even code."""
    codes = e4m3()[:127]
    ratio = np.clip(np.abs(values) / scale, 0, 448)
    above = np.clip(np.searchsorted(codes, ratio), 1, 126)
    low, high = codes[above - 1], codes[above]
    nearer_high = (high - ratio < ratio - low) | ((high - ratio == ratio - low) & (above % 2 == 0))
    return np.copysign(np.where(nearer_high, high, low) * scale, values)


def weight(rank: dict[str, Floats], layer: str, form: str, group: int) -> Floats:
    """[out, in] of one rank, without its smoothing."""
    codes, scales = rank[f"{layer}.weight"], rank[f"{layer}.weights_scaling_factor"]
    if form == "fp8":
        return codes * scales.item()
    if form == "int8_sq":
        return codes * scales[:, None]
    packed = codes.astype(np.int64) & 255
    nibbles = np.empty((2 * len(packed), packed.shape[1]), np.int64)
    nibbles[0::2], nibbles[1::2] = packed & 15, packed >> 4
    signed = np.where(nibbles > 7, nibbles - 16, nibbles)
    whole: Floats = signed * np.repeat(scales, group, axis=1)
    if form == "w4a8_awq":
        whole = rounded_e4m3(whole, rank[f"{layer}.weights_scaling_factor_2"].item())
    return whole


def multiplied(rank: dict[str, Floats], layer: str, form: str, group: int, x: Floats) -> Floats:
    """What one rank's layer makes of [tokens, in]: smoothed, rounded, multiplied."""
    smoothing = rank.get(f"{layer}.prequant_scaling_factor")
    x = x if smoothing is None else x * smoothing
    scale = rank.get(f"{layer}.activation_scaling_factor")
    if scale is not None and form == "int8_sq":
        x = np.clip(np.round(x / scale.item()), -128, 127) * scale.item()
    elif scale is not None:
        x = rounded_e4m3(x, scale.item())
    return x @ weight(rank, layer, form, group).T
