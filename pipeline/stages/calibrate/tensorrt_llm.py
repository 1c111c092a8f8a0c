"""The TensorRT-LLM checkpoint for one tensor-parallel size: config.json and one file a rank.

ModelOpt 0.47 writes it (its exporter is legacy, the format is the one that TensorRT-LLM 0.17 to 1.2 read)
and leaves traps, which are repaired from the source's configuration: with transformers 5 the rotary base and
scaling are silently lost; `rank` is the last rank's; Qwen models need `qwen_type`, `seq_length` and `attn_bias`,
and Qwen3 `qk_layernorm`; an unquantized export brings a quant_cfg.json that only mixed precision has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.models import Architecture
from pipeline.plan.parallelism import Parallelism
from pipeline.runtimes.tensorrt.checkpoint import MODEL_TYPES, describe
from pipeline.stages.calibrate.snapshot import restored
from pipeline.stages.calibrate.unified import write_json


def export(model: Any, architecture: Architecture, sizes: Parallelism, into: Path) -> None:
    """Write the checkpoint; the model is left as it was."""
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    with torch.inference_mode(), restored(model):
        export_tensorrt_llm_checkpoint(
            model,
            MODEL_TYPES[architecture.family],
            stored_dtype(architecture),
            export_dir=into,
            inference_tensor_parallel=sizes.tensor,
            inference_pipeline_parallel=sizes.pipeline,
        )
    config = json.loads((into / "config.json").read_text(encoding="utf-8"))
    repaired = repair(config, architecture)
    write_json(into / "config.json", repaired)
    if repaired["quantization"].get("quant_algo") != "MIXED_PRECISION":
        (into / "quant_cfg.json").unlink(missing_ok=True)


def stored_dtype(architecture: Architecture) -> torch.dtype:
    """TensorRT-LLM computes in 16 bits: a float32 source is stored as float16."""
    return torch.bfloat16 if architecture.dtype == "bfloat16" else torch.float16


def repair(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """config.json with what ModelOpt lost or got wrong of the model."""
    return {key: value for key, value in config.items() if key != "rank"} | describe(architecture)
