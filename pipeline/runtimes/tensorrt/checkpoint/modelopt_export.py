"""The TensorRT-LLM checkpoint for one tensor-parallel size: config.json and one file a rank.

ModelOpt 0.47 writes it (its exporter is legacy, the format is the one that TensorRT-LLM 0.17 to 1.2 read)
and leaves traps, which are repaired from the source's configuration: with transformers 5 the rotary base and
scaling are silently lost; `rank` is the last rank's; Qwen models need `qwen_type`, `seq_length` and `attn_bias`,
and Qwen3 `qk_layernorm`; an unquantized export brings a quant_cfg.json that only mixed precision has.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.models import Architecture
from pipeline.plan.parallelism import Parallelism
from pipeline.runtimes.tensorrt.checkpoint.config import MODEL_TYPES, describe, stored_dtype


def export(model: Any, architecture: Architecture, sizes: Parallelism, into: Path) -> None:
    """Write the checkpoint of a calibrated model, which is left as it was.

    Args:
        model: Calibrated by ModelOpt; dense, with separate projections.
        sizes: Number of ranks that the checkpoint is for.
        into: Folder to be made: config.json and one safetensors file a rank.
    """
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    with torch.inference_mode(), _restored(model):
        export_tensorrt_llm_checkpoint(
            model,
            MODEL_TYPES[architecture.family],
            torch_dtype(architecture),
            export_dir=into,
            inference_tensor_parallel=sizes.tensor,
            inference_pipeline_parallel=sizes.pipeline,
        )
    config = json.loads((into / "config.json").read_text(encoding="utf-8"))
    repaired = repair(config, architecture)
    text = json.dumps(repaired, ensure_ascii=False, indent=2)
    (into / "config.json").write_text(text + "\n", encoding="utf-8")
    if repaired["quantization"].get("quant_algo") != "MIXED_PRECISION":
        (into / "quant_cfg.json").unlink(missing_ok=True)


def torch_dtype(architecture: Architecture) -> torch.dtype:
    """The 16-bit type in which the checkpoint holds what is not quantized."""
    dtype: torch.dtype = getattr(torch, stored_dtype(architecture))
    return dtype


def repair(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """config.json with what ModelOpt lost or got wrong of the model."""
    return {key: value for key, value in config.items() if key != "rank"} | describe(architecture)


@contextlib.contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Undo what happens to parameters, scales and configuration: each export starts from what was calibrated.

    ModelOpt's TensorRT-LLM export gives q, k and v common scales in place (with AWQ and SmoothQuant it rewrites their
    weights, too), and writes the padded vocabulary into the model's configuration. It replaces parameters and does not
    write into them, so keeping the old ones costs no memory until they are replaced; scales are small and are copied.
    """
    parameters = {name: dict(module._parameters) for name, module in model.named_modules()}
    buffers = {name: _copies(module._buffers) for name, module in model.named_modules()}
    config = copy.deepcopy(model.config.__dict__)
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module._parameters.clear()
            module._parameters.update(parameters[name])
            module._buffers.clear()
            module._buffers.update(buffers[name])
        model.config.__dict__.clear()
        model.config.__dict__.update(config)


def _copies(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
