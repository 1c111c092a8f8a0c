"""Limits of this machine's processor that a model meets: no bf16 arithmetic, or inexact sums of 8-bit products.

Asked of OpenVINO when an engine starts, because a package may be served on another machine than the one that made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import openvino as ov
import openvino.opset15 as ops


class UnfitProcessor(RuntimeError):
    """This processor cannot compute in the precision that is asked for."""


def check_precision(precision: str) -> None:
    """Raise UnfitProcessor for a precision ("f32" or "bf16") whose KV cache OpenVINO would refuse, in its own terms."""
    core = ov.Core()
    if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        name = str(core.get_property("CPU", "FULL_DEVICE_NAME")).strip()
        raise UnfitProcessor(
            f"{name} has no bf16 arithmetic (AVX512_BF16, AMX): set runtime.precision to f32, or serve elsewhere"
        )


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
    given = ops.parameter([-1, size], ov.Type.f32)
    low, high = ops.constant(np.float32(-128)), ops.constant(np.float32(127))
    weight = ops.convert(ops.constant(np.full((size, size), largest, np.int8)), ov.Type.f32)
    scaled = ops.multiply(weight, ops.constant(np.ones((size, 1), np.float32)))
    product = ops.matmul(ops.fake_quantize(given, low, high, low, high, 256), scaled, False, True)
    compiled = ov.Core().compile_model(
        ov.Model([product], [given]), "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    )
    made = compiled(np.full((2, size), largest, np.float32))[0]
    return bool((made == size * largest * largest).all())
