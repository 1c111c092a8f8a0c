"""Format `auto`: ModelOpt's AutoQuantize chooses a format for each group of layers, under a budget of bits.

Every candidate is calibrated, and its cost for each group is measured once, by gradients of the loss on the calibration
text: `measure_sensitivity`, whose artifact holds ModelOpt's search state and sensitivity.json. A budget is then a small
linear program: `choose` takes the state as it is, so that a second budget measures nothing again.

Layers that engines compute as one (q, k and v; gate and up) get one format; any layer may keep its 16 bits; the output
projection always does. Written against ModelOpt 0.47, `modelopt.torch.quantization.auto_quantize`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipeline.contracts.engine_memory import format_bits
from pipeline.models import Format
from pipeline.progress import Progress, Task
from pipeline.recipe import Quantization
from pipeline.stages.calibrate.measurement import (
    KV_CONFIG,
    UNQUANTIZED,
    Batch,
    forward,
    layer_format,
    linear_layers,
    modelopt_config,
)
from pipeline.stages.calibrate.model import all_experts
from pipeline.store import Json

STATE, SENSITIVITY = "search.pt", "sensitivity.json"
_UNQUANTIZED_BITS = 16.0
_ROUNDING = 1e-5  # bits, so that a budget of a format's own bits holds that format everywhere


def search(
    model: Any,
    quantization: Quantization,
    bits: float,
    batches: Sequence[Batch],
    state: Path,
    progress: Progress,
) -> Mapping[str, Any]:
    """Run AutoQuantize on a model, in place; what `state` holds already is not measured again.

    Args:
        bits: Budget: the average of all layers that may be quantized.
        state: File of ModelOpt's search; made, or gone on with.

    Returns:
        ModelOpt's search state.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization import algorithms

    assert quantization.auto is not None, "the recipe's rules ask for it"
    configs = []
    for form in quantization.auto.formats:
        config = modelopt_config(Format(form), quantization.awq_block_size, "auto", model.device.type)
        configs.append(config | {"effective_bits": format_bits(form, quantization.awq_block_size)})
    calibrations = sum(1 for config in configs if config["algorithm"] is not None)
    total = len(batches) * (calibrations + 1)
    torch.manual_seed(0)
    with (
        progress.task("measure sensitivity", total, "batches") as task,
        _amended(algorithms),
        all_experts(model),
    ):
        _, search_state = mtq.auto_quantize(
            model,
            constraints={"effective_bits": _with_others(model, bits)},
            quantization_formats=configs,
            data_loader=batches,
            forward_step=_Forward(task),
            loss_func=_loss,
            disabled_layers=[f"*{name}" for name in UNQUANTIZED],
            # ModelOpt takes a quarter of the steps for AWQ; here all formats see all samples.
            num_calib_steps=4 * len(batches),
            num_score_steps=len(batches),
            checkpoint=str(state),
        )
    model.requires_grad_(False)
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
    model.eval()
    result: Mapping[str, Any] = search_state
    return result


def _with_others(model: Any, bits: float) -> float:
    """Turn an average of the layers that may be quantized into ModelOpt's, which counts the others, too."""
    weights = sum(int(layer.weight.numel()) for _, layer in linear_layers(model))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    others = sum(int(module.weight.numel()) for module in linears) - weights
    average = (bits * weights + _UNQUANTIZED_BITS * others) / (weights + others)
    return min(_UNQUANTIZED_BITS, average + _ROUNDING)


class _Forward:
    """Logits of a batch, [tokens, vocab]; each call is a step of the task."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = model.lm_head(forward(model, batch)[0])
        self._task.advance(1)
        return logits


def _loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Loss of all tokens of a batch that follow another one of their sample.

    The sum, not the mean: scores are squares of its gradients, and ModelOpt's solver of linear programs takes costs
    below 1e-7 for none.
    """
    tokens = torch.tensor(batch.tokens, device=logits.device)
    starts = [sum(batch.lengths[:number]) for number in range(len(batch.lengths) + 1)]
    rows = torch.cat([torch.arange(begin, end - 1) for begin, end in pairwise(starts)]).to(logits.device)
    return functional.cross_entropy(logits[rows].float(), tokens[rows + 1], reduction="sum")


@contextlib.contextmanager
def _amended(module: Any) -> Iterator[None]:
    """Keep ModelOpt's progress bars off the screen, and mend two things of ModelOpt 0.47.

    It saves its calibrations, and fails on them when they are loaded: the empty scores come back as a plain
    dictionary, to which it then adds by keys that are not there. And it would score Mixtral's experts by the output of
    their list, which computes nothing; here by the output of the block, as it does with Qwen's.
    """
    bars, searcher = module.tqdm, module.AutoQuantizeGradientSearcher
    load, rules = searcher.load_search_checkpoint, searcher.score_module_rules

    def load_amended(self: Any) -> bool:
        loaded: bool = load(self)
        self.candidate_stats = defaultdict(dict, self.candidate_stats)
        return loaded

    module.tqdm, searcher.load_search_checkpoint = (lambda iterable, **_: iterable), load_amended
    searcher.score_module_rules = [r"^(.*?\.block_sparse_moe)\.experts\.\d+\.(w1|w2|w3)$", *rules]
    try:
        yield
    finally:
        module.tqdm, searcher.score_module_rules = bars, rules
        del searcher.load_search_checkpoint  # that of its base class again


def measure_sensitivity(
    model: Any,
    quantization: Quantization,
    batches: Sequence[Batch],
    kept: Path,
    into: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Calibrate every candidate and measure what each costs; search.pt and sensitivity.json into the folder `into`.

    Args:
        kept: File outside of `into` in which a killed measurement goes on: calibrations are kept before the scores.

    Returns:
        The content of sensitivity.json.
    """
    assert quantization.auto is not None, "the recipe's rules ask for it"
    kept.parent.mkdir(parents=True, exist_ok=True)
    state = search(model, quantization, _UNQUANTIZED_BITS, batches, kept, progress)
    shutil.copyfile(kept, into / STATE)
    kept.unlink()
    block = quantization.awq_block_size
    names = {format_bits(form, block): form for form in ("none", *quantization.auto.formats)}
    groups: list[dict[str, Any]] = []
    for stats in state["candidate_stats"].values():
        if stats["module_names"][0].endswith(UNQUANTIZED):
            continue
        weights = round(stats["uncompressed_cost"])
        candidates: dict[str, float] = {}
        for recipe, score in zip(stats["formats"], stats["scores"], strict=True):
            candidates[names[round(recipe.compression * _UNQUANTIZED_BITS, 3)]] = float(score)
        groups.append({"layers": sorted(stats["module_names"]), "weights": weights, "scores": candidates})
    return {"bits": {form: bits for bits, form in names.items()}, "groups": groups}


def choose(
    model: Any,
    quantization: Quantization,
    batches: Sequence[Batch],
    state: Path,
    work: Path,
    progress: Progress,
) -> dict[str, Json]:
    """Quantize a model in place: each group of layers gets the format that costs least under the recipe's budget.

    Args:
        state: search.pt of `measure_sensitivity`.
        work: File for a copy of it, which ModelOpt writes to; removed.

    Returns:
        "effective_bits" that were reached, "score", and "formats": format -> number of layers.
    """
    assert quantization.auto is not None, "the recipe's rules ask for it"
    shutil.copyfile(state, work)
    try:
        search_state = search(model, quantization, quantization.auto.effective_bits, batches, work, progress)
    finally:
        work.unlink(missing_ok=True)
    if quantization.kv_cache == "fp8":
        _calibrate_cache(model, batches)
    counts: defaultdict[str, int] = defaultdict(int)
    bits, weights = 0.0, 0
    for _, layer in linear_layers(model):
        form = str(layer_format(layer))
        counts[form] += 1
        weights += layer.weight.numel()
        bits += layer.weight.numel() * format_bits(form, quantization.awq_block_size)
    return {
        "effective_bits": round(bits / weights, 3),
        "score": float(search_state["best"]["score"]),
        "formats": dict(sorted(counts.items())),
    }


def _calibrate_cache(model: Any, batches: Sequence[Batch]) -> None:
    """Measure the scales of keys and values, which AutoQuantize leaves alone, with the weights as they were chosen."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.conversion import set_quantizer_by_cfg, set_quantizer_by_cfg_context

    def read_samples(model: Any) -> None:
        for batch in batches:
            forward(model, batch)

    cache = [entry for entry in getattr(mtq, KV_CONFIG)["quant_cfg"] if entry["quantizer_name"] != "*"]
    set_quantizer_by_cfg(model, cache)
    with (
        torch.no_grad(),
        set_quantizer_by_cfg_context(model, [{"quantizer_name": "*", "enable": False}, *cache]),
    ):
        mtq.calibrate(model, algorithm="max", forward_loop=read_samples)
