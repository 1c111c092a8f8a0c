"""The ModelOpt configuration of each format, and how often calibration reads the samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pipeline.contracts.rules import rule
from pipeline.models import Format
from pipeline.recipe import Quantization

# ModelOpt's own defaults; the output projection stays as it is in all of them.
_CONFIGS: Mapping[Format, str] = {
    Format.FP8: "FP8_DEFAULT_CFG",
    Format.INT4_AWQ: "INT4_AWQ_CFG",
    Format.W4A8_AWQ: "W4A8_AWQ_BETA_CFG",
    Format.INT8_SQ: "INT8_SMOOTHQUANT_CFG",
    Format.NVFP4: "NVFP4_DEFAULT_CFG",
}
_KV_CONFIG = "FP8_KV_CFG"

# AWQ measures activations in one pass and searches the best smoothing in another.
PASSES: Mapping[Format, int] = {
    Format.FP8: 1,
    Format.INT4_AWQ: 2,
    Format.W4A8_AWQ: 2,
    Format.INT8_SQ: 1,
    Format.NVFP4: 1,
}


def group_size(form: Format, quantization: Quantization) -> int | None:
    """Weights that share one scale; None where a row or the whole tensor does."""
    if form in (Format.INT4_AWQ, Format.W4A8_AWQ):
        return quantization.awq_block_size
    sizes: dict[str, int] = rule("quantization.groups").facts["sizes"]
    return sizes.get(form)


def modelopt_config(form: Format, awq_block_size: int, kv_cache: str) -> dict[str, Any]:
    """What `mtq.quantize` is given."""
    import modelopt.torch.quantization as mtq

    config: dict[str, Any] = copy.deepcopy(getattr(mtq, _CONFIGS[form]))
    if form in (Format.INT4_AWQ, Format.W4A8_AWQ):
        for entry in config["quant_cfg"]:
            steps = entry.get("cfg") or []
            for step in steps if isinstance(steps, list) else [steps]:
                if "block_sizes" in step:
                    step["block_sizes"][-1] = awq_block_size
    if kv_cache == "fp8":
        config["quant_cfg"] += copy.deepcopy(getattr(mtq, _KV_CONFIG)["quant_cfg"])
    return config
