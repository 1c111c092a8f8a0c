"""The calibration itself: ModelOpt's quantizers watch the samples go by; their scales are then checked, one by one.

Written against ModelOpt 0.47, whose own default configurations are used.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import StageError
from pipeline.models import Architecture, Format
from pipeline.models.quantization import AWQ, FP4
from pipeline.progress import Progress
from pipeline.stages.calibrate.model import all_experts
from pipeline.stages.evaluate.decoder import E2M1_MAX, E4M3_MAX, round_nvfp4
from pipeline.store import Json

# ModelOpt's own defaults; the output projection stays as it is in all of them.
_CONFIGS: Mapping[Format, str] = {
    Format.FP8: "FP8_DEFAULT_CFG",
    Format.INT4_AWQ: "INT4_AWQ_CFG",
    Format.W4A8_AWQ: "W4A8_AWQ_BETA_CFG",
    Format.INT8_SQ: "INT8_SMOOTHQUANT_CFG",
    Format.NVFP4: "NVFP4_DEFAULT_CFG",
    Format.W4A16_NVFP4: "W4A16_NVFP4_CFG",
}
KV_CONFIG = "FP8_KV_CFG"
UNQUANTIZED = (
    "lm_head",
    "block_sparse_moe.gate",
    "mlp.gate",
)  # ends of the names of layers that keep their precision
_FP4_BACKEND = "nvfp4_in_torch"

# AWQ measures activations in one pass and searches the best smoothing in another; weights alone need no samples.
_PASSES: Mapping[Format, int] = {
    Format.FP8: 1,
    Format.INT4_AWQ: 2,
    Format.W4A8_AWQ: 2,
    Format.INT8_SQ: 1,
    Format.NVFP4: 1,
    Format.W4A16_NVFP4: 0,
}
# Formats that round inputs, and those that smooth them.
_WITH_INPUT = (Format.FP8, Format.W4A8_AWQ, Format.INT8_SQ, Format.NVFP4)
_SMOOTHED = (Format.INT4_AWQ, Format.W4A8_AWQ, Format.INT8_SQ)


def measure(
    model: Any,
    form: Format,
    *,
    awq_block_size: int,
    kv_cache: str,
    batches: Sequence[Batch],
    progress: Progress,
) -> list[float]:
    """Insert the quantizers into a model, in place, and measure their scales.

    Args:
        awq_block_size: Weights that share a scale, in AWQ formats.
        kv_cache: "fp8" measures keys and values, too.

    Returns:
        Seconds of each pass over the samples.
    """
    import modelopt.torch.quantization as mtq

    seconds: list[float] = []
    samples = sum(batch.samples for batch in batches)

    def read_samples(model: Any) -> None:
        began = time.monotonic()
        label = f"calibrate {form}, pass {len(seconds) + 1} of {_PASSES[form]}"
        with progress.task(label, samples, "samples") as task:
            for batch in batches:
                forward(model, batch)
                task.advance(batch.samples)
        seconds.append(round(time.monotonic() - began, 2))

    torch.manual_seed(0)
    with torch.no_grad(), all_experts(model):
        config = modelopt_config(form, awq_block_size, kv_cache, model.device.type)
        needed = _PASSES[form] or kv_cache == "fp8"
        mtq.quantize(model, config, read_samples if needed else None)
    return seconds


def modelopt_config(form: Format, awq_block_size: int, kv_cache: str, device: str = "cpu") -> dict[str, Any]:
    """Make what `mtq.quantize` is given, a copy of its own. On "cpu", four-bit floats are rounded by `_round_fp4`."""
    import modelopt.torch.quantization as mtq

    config: dict[str, Any] = copy.deepcopy(getattr(mtq, _CONFIGS[form]))
    for entry in config["quant_cfg"]:
        steps = entry.get("cfg") or []
        for step in steps if isinstance(steps, list) else [steps]:
            if form in AWQ and "block_sizes" in step:
                step["block_sizes"][-1] = awq_block_size
            if form in FP4 and device == "cpu":
                step["backend"] = _fp4_backend()
    if kv_cache == "fp8":
        config["quant_cfg"] += copy.deepcopy(getattr(mtq, KV_CONFIG)["quant_cfg"])
    return config


def _fp4_backend() -> str:
    """Register `_round_fp4` with ModelOpt, whose own rounding to four-bit floats is a CUDA kernel."""
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend(_FP4_BACKEND):
        tensor_quantizer.register_quant_backend(_FP4_BACKEND, _round_fp4)
    return _FP4_BACKEND


def _round_fp4(x: Tensor, quantizer: Any) -> Tensor:
    return round_nvfp4(x, float(quantizer.amax) / (E4M3_MAX * E2M1_MAX)).to(x.dtype)


def linear_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and modules of the linear layers, without the output projection and routers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(UNQUANTIZED):
            yield name, module


def layer_format(layer: Any) -> Format:
    """Tell in which format ModelOpt will export a linear layer, by its quantizers."""
    from modelopt.torch.export.quant_utils import get_quantization_format

    return Format(get_quantization_format(layer) or Format.NONE)


def check_scales(model: Any, architecture: Architecture, form: Format, kv_cache: str) -> dict[str, Json]:
    """Check that every scale was measured, is finite and positive.

    Args:
        form: One for every layer, or AUTO: each as its quantizers are.

    Returns:
        Name of the scale -> its smallest and largest value, and how many there are.

    Raises:
        StageError: With every scale that is not usable.
    """
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
        chosen = layer_format(layer) if form is Format.AUTO else form
        if chosen is Format.NONE:
            continue
        weight = getattr(layer, "weight_quantizer", None)
        for step, quantizer in enumerate(_steps(weight)):
            yield f"{linear.name}.weight_amax{f'_{step + 1}' if step else ''}", _amax(quantizer)
        reader = getattr(layer, "input_quantizer", None)
        if chosen in _WITH_INPUT:
            yield f"{linear.name}.input_amax", _amax(reader)
        if chosen in _SMOOTHED:
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


_MOST_TOKENS = 8192  # a wide feed-forward layer makes a GiB of float32 from so many


# Samples in batches


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that go through the model together: neighbours in length, one after the other in a row, never padded.

    Positions begin at 0 with each sample, and attention stays within each sample (`check_packing` proves it for the
    model at hand). Every token that a layer sees is a real one, so statistics need no mask, and batches are of nearly
    equal size: AWQ averages over batches, whatever their size.
    """

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]  # of each sample

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self.lengths)

    @property
    def positions(self) -> list[int]:
        """Position of each token in its sample, from 0."""
        return [position for length in self.lengths for position in range(length)]


def make_batches(samples: Sequence[Sequence[int]], budget_tokens: int) -> list[Batch]:
    """Pack samples into batches of nearly equal size, shortest samples first.

    Args:
        budget_tokens: Most tokens of a batch (8192 at most), unless a single sample is longer.
    """
    ordered = sorted(samples, key=lambda sample: (len(sample), tuple(sample)))
    total = sum(len(sample) for sample in ordered)
    count = max(1, math.ceil(total / max(1, min(budget_tokens, _MOST_TOKENS))))
    batches: list[Batch] = []
    pending: list[Sequence[int]] = []
    done = 0
    for sample in ordered:
        pending.append(sample)
        done += len(sample)
        if done * count >= total * (len(batches) + 1):
            batches.append(_pack(pending))
            pending = []
    return batches if not pending else [*batches, _pack(pending)]


def check_packing(model: Any, samples: Sequence[Sequence[int]]) -> None:
    """Run a few short samples together, and alone as transformers would.

    Raises:
        StageError: The results differ: samples in one row influence each other.
    """
    import torch

    few = [list(sample[: 10 + 2 * (number > 1)]) for number, sample in enumerate(samples[:4])]
    with torch.inference_mode():
        rows = [torch.tensor([sample], device=model.device) for sample in few]
        outputs = [model.model(input_ids=row, use_cache=False).last_hidden_state for row in rows]
        alone, together = torch.cat(outputs, dim=1).float(), forward(model, _pack(few)).float()
    apart = (alone - together).abs().max() / alone.abs().max()
    if not apart < 0.02:  # also where it is not a number
        raise StageError(
            f"samples in one row influence each other in {type(model).__name__} (by {apart:.3g})"
        )


def forward(model: Any, batch: Batch) -> Any:
    """Run the decoder without its output projection, whose logits are not needed.

    Returns:
        [1, tokens, hidden]
    """
    import torch

    device = model.device
    return model.model(
        input_ids=torch.tensor([batch.tokens], device=device),
        position_ids=torch.tensor([batch.positions], device=device),
        attention_mask=torch.zeros(1, 1, 1, 1, device=device),  # "prepared": transformers builds none
        sample_lengths=batch.lengths,
        use_cache=False,
    ).last_hidden_state


def _pack(samples: Sequence[Sequence[int]]) -> Batch:
    return Batch(
        tokens=tuple(token for sample in samples for token in sample),
        lengths=tuple(len(sample) for sample in samples),
    )
