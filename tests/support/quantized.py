"""Checkpoints quantized by plain rounding, in the files that ModelOpt 0.47 would write. No torch, no
calibration.

The scales of inputs and caches are not measured; they are plausible numbers. For tests of what reads such
files: where the numbers themselves are in question, the tests have ModelOpt write the file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

ALGORITHMS = {
    "fp8": "FP8",
    "int4_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "int8_sq": "W8A8_SQ_PER_CHANNEL",
}
INPUT_AMAX = 16.0


def quantize_checkpoint(
    source: Path,
    into: Path,
    form: str,
    *,
    group_size: int = 64,
    kv_cache: bool = False,
    head: bool = False,
    seed: int = 0,
) -> Path:
    """Write the checkpoint `source` into `into`, the linear layers of its blocks quantized, and `head` if
    asked.
    """
    into.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, into / name)
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, value in load_file(source / "model.safetensors").items():
        layer, part = name.rsplit(".", 1)
        if part != "weight" or not (layer.endswith("_proj") or (head and layer == "lm_head")):
            tensors[name] = value
            continue
        parts = _quantize(value.astype(np.float32), layer, form, group_size, random)
        tensors |= {f"{layer}.{key}": np.array(array, order="C") for key, array in parts.items()}
        if kv_cache and layer.endswith(("k_proj", "v_proj")):
            tensors[f"{layer}.{layer[-6]}_scale"] = np.array(8.0 / 448, np.float32)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    quantization = {
        "quant_algo": ALGORITHMS[form],
        "kv_cache_quant_algo": "FP8" if kv_cache else None,
        "exclude_modules": ["model.embed_tokens"] if head else ["lm_head", "model.embed_tokens"],
    }
    if form in ("int4_awq", "w4a8_awq"):
        quantization |= {"group_size": group_size, "has_zero_point": False, "pre_quant_scale": True}
    described = {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization}
    (into / "hf_quant_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return into


def _quantize(
    weight: np.ndarray, layer: str, form: str, group_size: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    if form == "fp8":
        scale = np.float32(np.abs(weight).max() / 448)
        return {
            "weight": (weight / scale).astype(ml_dtypes.float8_e4m3fn),
            "weight_scale": scale,
            "input_scale": np.float32(INPUT_AMAX / 448),
        }
    smooth = np.exp(0.2 * random.standard_normal(weight.shape[1])).astype(np.float32)
    if form == "int8_sq":
        weight = weight / smooth
        scale = np.abs(weight).max(axis=1) / 127
        return {
            "weight": np.round(weight / scale[:, None]).astype(np.int8),
            "weight_scale": scale.astype(np.float32),
            "input_scale": np.float32(INPUT_AMAX / 127),
            "pre_quant_scale": smooth,
        }
    smoothed = layer.endswith(("o_proj", "down_proj"))
    weight = weight / smooth if smoothed else weight
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // group_size, group_size)
    scale = np.abs(groups).max(axis=2) / 7
    codes = np.clip(np.round(groups / scale[:, :, None]), -8, 7).astype(np.int8).reshape(rows, columns)
    nibbles = codes.view(np.uint8) & 0x0F
    parts = {"weight": nibbles[0::2] | (nibbles[1::2] << 4), "weight_scale": scale.astype(np.float32)}
    if smoothed:
        parts["pre_quant_scale"] = smooth
    if form == "w4a8_awq":
        parts["weight_scale_2"] = np.float32(np.abs(weight).max() / 448)
        parts["input_scale"] = np.float32(INPUT_AMAX / 448)
    return parts
