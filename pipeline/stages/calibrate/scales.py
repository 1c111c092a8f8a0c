"""What was measured, quantizer by quantizer: there at every layer, finite and positive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import StageError
from pipeline.models import Architecture, Format
from pipeline.store import Json

_WITH_INPUT = (Format.FP8, Format.W4A8_AWQ, Format.INT8_SQ, Format.NVFP4)
_SMOOTHED = (Format.INT4_AWQ, Format.W4A8_AWQ, Format.INT8_SQ)


def check_scales(model: Any, architecture: Architecture, form: Format, kv_cache: str) -> dict[str, Json]:
    """Smallest and largest value of every scale, by layer; StageError lists everything that is wrong."""
    faults: list[str] = []
    facts: dict[str, Json] = {}
    for name, values in _measured(model, architecture, form, kv_cache):
        fault = _fault(values)
        if fault is None and values is not None:
            facts[name] = {"min": float(values.min()), "max": float(values.max()), "count": values.numel()}
        else:
            faults.append(f"{name} {fault}")
    if faults:
        count = "1 scale is" if len(faults) == 1 else f"{len(faults)} scales are"
        raise StageError("\n  ".join([f"calibration went wrong: {count} not usable", *faults]))
    return facts


def _fault(values: Tensor | None) -> str | None:
    if values is None:
        return "was not measured"
    if not torch.isfinite(values).all():
        return f"is not finite in {int((~torch.isfinite(values)).sum())} of {values.numel()} values"
    if not (values > 0).all():
        return f"is not positive in {int((values <= 0).sum())} of {values.numel()} values"
    return None


def _measured(
    model: Any, architecture: Architecture, form: Format, kv_cache: str
) -> Iterator[tuple[str, Tensor | None]]:
    for linear in architecture.linears():
        if linear.router:
            continue
        layer = model.get_submodule(linear.name)
        weight = getattr(layer, "weight_quantizer", None)
        for step, quantizer in enumerate(_steps(weight)):
            yield f"{linear.name}.weight_amax{f'_{step + 1}' if step else ''}", _amax(quantizer)
        reader = getattr(layer, "input_quantizer", None)
        if form in _WITH_INPUT:
            yield f"{linear.name}.input_amax", _amax(reader)
        if form in _SMOOTHED:
            yield f"{linear.name}.pre_quant_scale", getattr(reader, "_pre_quant_scale", None)
    if kv_cache == "fp8":
        for index in range(architecture.layers):
            block = f"model.layers.{index}.self_attn"
            attention = model.get_submodule(block)
            for cache in ("k", "v"):
                yield f"{block}.{cache}_amax", _amax(getattr(attention, f"{cache}_bmm_quantizer", None))


def _steps(quantizer: Any) -> list[Any]:
    """W4A8 rounds weights twice, in a quantizer that is a list of two."""
    from modelopt.torch.quantization.nn import SequentialQuantizer

    return list(quantizer) if isinstance(quantizer, SequentialQuantizer) else [quantizer]


def _amax(quantizer: Any) -> Tensor | None:
    if quantizer is None or not quantizer.is_enabled:
        return None
    amax: Tensor | None = quantizer.amax
    return amax
