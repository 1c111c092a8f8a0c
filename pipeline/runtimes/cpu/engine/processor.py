"""Limits of this processor: no bf16 arithmetic, inexact sums of 8-bit products, small pages.

Asked of OpenVINO when an engine starts, because a package may be served on another machine than the one that made it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import openvino as ov
import openvino.opset15 as ops

_HUGE = 2 << 20  # bytes of a huge page
_DONTNEED, _COLLAPSE = 4, 25  # linux/mman.h: MADV_DONTNEED, MADV_COLLAPSE


class UnfitProcessor(RuntimeError):
    """This processor cannot compute in the precision that is asked for."""


def chosen_precision(
    precision: Literal["auto", "f32", "bf16"], *, gains: bool
) -> tuple[Literal["f32", "bf16"], str]:
    """Choose the type of activations on this processor, and say why.

    Args:
        gains: Whether the model is large enough to be faster in bf16; decides for "auto".

    Raises:
        UnfitProcessor: bf16 is asked for, and OpenVINO would refuse its KV cache, in its own terms.
    """
    if precision == "f32":
        return "f32", "as asked"
    core = ov.Core()
    able = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    name = str(core.get_property("CPU", "FULL_DEVICE_NAME")).strip()
    if precision == "bf16" and not able:
        raise UnfitProcessor(
            f"{name} has no bf16 arithmetic (AVX512_BF16, AMX): set runtime.precision to auto, or serve elsewhere"
        )
    if precision == "bf16":
        return "bf16", "as asked"
    if not able:
        return "f32", f"{name} has no bf16 arithmetic"
    return ("bf16", f"{name} has it") if gains else ("f32", "the model is too small to gain by bf16")


def integer_options(model: ov.Model) -> Mapping[str, str]:
    """Return the further options with which `model` multiplies rounded inputs exactly on this processor.

    OpenVINO multiplies 8-bit inputs and weights as integers. Processors without VNNI (AVX2, the first of AVX-512) sum
    pairs of products in 16 bits, which do not hold them: logits were off by 5% of the largest. There the same
    numbers are multiplied in f32. The option is OpenVINO's own, not documented; 2026.4 takes it.
    """
    rounded = any(node.get_type_name() == "FakeQuantize" for node in model.get_ops())
    return {} if not rounded or _integers_are_exact() else {"LP_TRANSFORMS_MODE": "NO"}


@cache
def _integers_are_exact() -> bool:
    """Whether the largest 8-bit inputs and weights give the sum that they have."""
    size, largest = 64, 127
    values = ops.parameter([-1, size], ov.Type.f32)
    low, high = ops.constant(np.float32(-128)), ops.constant(np.float32(127))
    weight = ops.convert(ops.constant(np.full((size, size), largest, np.int8)), ov.Type.f32)
    scaled = ops.multiply(weight, ops.constant(np.ones((size, 1), np.float32)))
    product = ops.matmul(ops.fake_quantize(values, low, high, low, high, 256), scaled, False, True)
    compiled = ov.Core().compile_model(
        ov.Model([product], [values]), "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    )
    made = compiled(np.full((2, size), largest, np.float32))[0]
    return bool((made == size * largest * largest).all())


def settle_memory(weights: Path) -> None:
    """Move the packed weights of a model to huge pages, and release the pages of the file they were read from.

    Reading packed weights is what a step waits for; in pages of 4 KiB it takes a tenth longer. OpenVINO maps the file,
    and reads rows of the embedding from it again: they come from the system's cache. Kernels before Linux 6.1 have no
    MADV_COLLAPSE, and ignore it.
    """
    libc, name = ctypes.CDLL(None), str(weights.resolve())
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    mapping = r"^(\w+)-(\w+) (\S+) \S+ \S+ \S+ *(.*)\n(?:\w*Size: .*\n)+Rss: +(\d+)"
    for first, last, kind, path, resident_kb in re.findall(mapping, smaps, re.MULTILINE):
        begin, end = int(first, 16), int(last, 16)
        # What is not filled would take more memory in huge pages.
        filled = int(resident_kb) << 10 > 0.9 * (end - begin)
        if path == name:
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)
        elif kind == "rw-p" and path in ("", "[heap]") and filled:
            begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if begin < end:
                libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)
