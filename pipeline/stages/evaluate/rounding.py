"""What a quantized layer does to its input, simulated in float32 with the scales of the checkpoint.

The same roundings as ModelOpt 0.47's fake quantization; NVFP4 after its description (two levels of scales,
blocks of 16 scaled as they come), for ModelOpt's own needs a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.models import Format

E4M3_MAX, E2M1_MAX, BLOCK = 448.0, 6.0, 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_input(x: Tensor, form: Format, scale: float) -> Tensor:
    """x [..., in] as the kernels of `form` see it; float32."""
    if form in (Format.FP8, Format.W4A8_AWQ):
        return round_e4m3(x, scale)
    if form is Format.INT8_SQ:
        return (x / scale).round().clamp(-128, 127) * scale
    if form is Format.NVFP4:
        return round_nvfp4(x, scale)
    return x


def round_e4m3(x: Tensor, scale: float | Tensor) -> Tensor:
    """x as e4m3 multiples of `scale`, saturating."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def round_nvfp4(x: Tensor, scale: float) -> Tensor:
    """x as e2m1 multiples of a scale a block of 16, which is itself an e4m3 multiple of `scale`."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    wanted = blocks.abs().amax(dim=-1, keepdim=True) / E2M1_MAX
    step = round_e4m3(wanted, scale)
    step = torch.where(step > 0, step, torch.ones_like(step))
    return (round_e2m1(blocks / step) * step).flatten(-2)


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest of ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}; a tie goes to the even code."""
    values = torch.tensor(_E2M1, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    size = x.abs().clamp(max=E2M1_MAX)
    above, upto = torch.bucketize(size, middles, right=True), torch.bucketize(size, middles)
    code = torch.where(above % 2 == 0, above, upto)
    return torch.copysign(values[code], x)
