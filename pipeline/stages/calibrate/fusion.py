"""What engines make one layer has one scale and one smoothing, and weights are divided by the smoothing that is stored.

ModelOpt 0.47's exports leave two errors. In FP8, its Hugging Face export gives q, k and v scales of their own, and gate
and up as well: TensorRT-LLM's PyTorch backend, like others, then rounds the weights again, with the largest of them
(_torch/modules/linear.py, FP8QDQLinearMethod.load_weights_fused_qkv_linear). And weights are divided by a smoothing in
float32, which is stored in the 16 bits of the model, beside the layer or multiplied into the norm before it: the two do
not cancel, by up to 0.9 of a step of INT8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models import Format

_ONE_SCALE = (Format.FP8, Format.NVFP4)  # of gate and up: engines multiply them in one
_INTO_NORM = (Format.INT4_AWQ, Format.W4A8_AWQ)  # where the Hugging Face export puts the smoothing


@torch.no_grad()
def align(model: Any, form: Format, dtype: torch.dtype) -> None:
    """Before any export, in place: q, k and v alike; gate and up, too, where engines want it; smoothing as stored.

    Args:
        dtype: of 16 bits, in which a TensorRT-LLM checkpoint holds smoothing.
    """
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    for layer in model.model.layers:
        for norm, modules in _sharing_an_input(layer):
            if form in _ONE_SCALE or norm is layer.input_layernorm:
                preprocess_linear_fusion(modules)
    for module in model.modules():
        _round(module, dtype)


@torch.no_grad()
def fold(model: Any, form: Format, dtype: torch.dtype) -> None:
    """Before the Hugging Face export, in place: one smoothing for all that read the same norm, as it is stored there.

    Args:
        dtype: of the checkpoint's norms and smoothing.
    """
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    for layer in model.model.layers:
        for norm, modules in _sharing_an_input(layer):
            preprocess_linear_fusion(modules)
            if form in _INTO_NORM:
                _into_norm(norm, modules, dtype)
            for module in modules:
                _round(module, dtype)


def _sharing_an_input(layer: Any) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Linear layers of a decoder layer that engines make one, with the norm that they read."""
    attention, norm = layer.self_attn, layer.post_attention_layernorm
    if hasattr(attention, "q_proj"):
        yield layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
    experts = getattr(layer, "block_sparse_moe", None)
    if experts is not None:
        yield from ((norm, [expert.w1, expert.w3]) for expert in experts.experts)
    elif hasattr(layer.mlp, "gate_proj"):
        yield norm, [layer.mlp.gate_proj, layer.mlp.up_proj]


def _smoothing(module: Any) -> Tensor | None:
    """[in]: what multiplies the inputs of a linear layer; None if nothing does."""
    found: Tensor | None = getattr(getattr(module, "input_quantizer", None), "_pre_quant_scale", None)
    return found


def _round(module: Any, dtype: torch.dtype) -> None:
    """Give a layer the smoothing that `dtype` can hold."""
    smoothing = _smoothing(module)
    if smoothing is not None:
        _smooth(module, smoothing.to(dtype))


def _into_norm(norm: Any, modules: list[nn.Module], dtype: torch.dtype) -> None:
    """Multiply the smoothing into the norm, rounded; weights are divided by what became of it there."""
    smoothing = _smoothing(modules[0])
    assert smoothing is not None, "the caller looked"
    smoothing, before = smoothing.float(), norm.weight.float()
    after = (before * smoothing).to(dtype).float()
    kept = after / before
    kept = torch.where(torch.isfinite(kept) & (kept > 0), kept, smoothing)
    for module in modules:
        _smooth(module, kept, beside=torch.ones_like(kept))
    norm.weight = nn.Parameter(after.to(norm.weight.dtype), requires_grad=False)


def _smooth(module: Any, smoothing: Tensor, beside: Tensor | None = None) -> None:
    """Divide the weights by another smoothing, and measure their scales again.

    Args:
        smoothing: [in].
        beside: what stays with the layer, if not all of it.
    """
    from modelopt.torch.quantization.model_calib import enable_stats_collection, finish_stats_collection

    now = _smoothing(module)
    assert now is not None, "the caller looked"
    beside = smoothing if beside is None else beside
    if torch.equal(now.float(), smoothing.float()) and torch.equal(now.float(), beside.float()):
        return
    weight = module.weight.float() * now.float() / smoothing.float()
    module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
    now.copy_(beside)
    module.weight_quantizer.reset_amax()
    enable_stats_collection(module.weight_quantizer)
    module.weight_quantizer(module.weight)
    finish_stats_collection(module.weight_quantizer)
