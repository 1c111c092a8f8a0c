"""MXFP4 weights as NVFP4 ones, without calibration: the codes stay what they are, and only scales are written anew.

A block of 32 weights with the scale 2^k becomes two of 16 whose e4m3 scales are 2^(k - m), below one scale 2^m for the
whole matrix. With m = k_max - 8 that is exact for all blocks whose k is at most 17 below the largest, for e4m3 holds
the powers from 2^-9 to 2^8. Weights of smaller blocks are rounded once more, and those blocks are counted. Layers that
engines compute as one share m. The formula is ModelOpt 0.47's (torch/quantization/utils/numeric_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from pipeline.models import CheckpointReader, Format, TensorFiles
from pipeline.models.compressed import PARTS
from pipeline.models.layers import E2M1, unpack_e2m1
from pipeline.models.tensors import Array
from pipeline.progress import Progress
from pipeline.store import Json

_BIAS, _MOST, _LEAST = 127, 8, -9  # of e8m0; exponents of e4m3 that are powers of two
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def cast(source: CheckpointReader, into: Path, progress: Progress) -> dict[str, Json]:
    """Write a checkpoint whose layers are all in MXFP4, by compressed-tensors, as ModelOpt writes W4A16 NVFP4.

    Args:
        into: Folder; gets the tensors, config.json and hf_quant_config.json.

    Returns:
        Number of blocks, and of those that are not exact.
    """
    assert isinstance(source.tensors, TensorFiles), "it was read from files"
    into.mkdir(parents=True)
    files = sorted({header.file for header in source.tensors.headers.values()})
    layers = [shape.name for shape in source.architecture.linears()]
    kept = [name for name in layers if source.quantization.format_of(name) is Format.NONE]
    scales = {name: _scale(source, name) for name in layers if name not in kept}
    blocks, inexact, placed = 0, 0, dict[str, str]()
    with progress.task("cast MXFP4 to NVFP4", len(scales), "layers") as task:
        for file in files:
            tensors: dict[str, Array] = {}
            for name in (header.name for header in source.tensors.headers.values() if header.file == file):
                layer, _, part = name.rpartition(".")
                if layer in scales and part == "weight_packed":
                    exponents = _exponents(source, layer)
                    weight, near = _cast(source.tensors[name], exponents, scales[layer])
                    blocks, inexact = blocks + exponents.size, inexact + near
                    tensors |= {f"{layer}.{key}": value for key, value in weight.items()}
                    task.advance(1)
                elif layer not in scales or part not in (*PARTS, "weight_scale"):
                    tensors[name] = source.tensors[name]
            save_file(
                {key: np.array(value) for key, value in tensors.items()}, into / file.name, {"format": "pt"}
            )
            placed |= dict.fromkeys(tensors, file.name)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": dict(sorted(placed.items()))}
        (into / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
    _write_settings(source, into, kept)
    return {"blocks": blocks, "inexact_blocks": inexact}


def _exponents(source: CheckpointReader, layer: str) -> Array:
    """k of each block, [out, in / 32]."""
    stored: Array = source.tensors[f"{layer}.weight_scale"].view(np.uint8).astype(np.int32) - _BIAS
    return stored


def _scale(source: CheckpointReader, layer: str) -> int:
    """m of a layer: that of all which engines compute as one with it."""
    return max(int(_exponents(source, one).max()) for one in _joined(layer)) - _MOST


def _joined(layer: str) -> Iterator[str]:
    head, _, last = layer.rpartition(".")
    names = next((group for group in _TOGETHER if last in group), (last,))
    yield from (f"{head}.{name}" for name in names)


def _cast(packed: Array, exponents: Array, scale: int) -> tuple[dict[str, Array], int]:
    """Tensors of a layer, and how many of its blocks are rounded once more."""
    wanted = exponents - scale
    held = np.maximum(wanted, _LEAST)
    small = wanted < held
    if small.any():
        values = unpack_e2m1(packed).reshape(*exponents.shape, 32) * np.ldexp(1.0, wanted - held)[..., None]
        nearest = np.abs(np.abs(values)[..., None] - E2M1[:8]).argmin(axis=-1) + np.where(
            np.signbit(values), 8, 0
        )
        codes = nearest.astype(np.uint8).reshape(len(packed), -1)
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    steps = np.repeat(np.ldexp(np.float32(1), held), 2, axis=1).astype(ml_dtypes.float8_e4m3fn)
    parts = {"weight": packed, "weight_scale": steps, "weight_scale_2": np.array(2.0**scale, np.float32)}
    return parts, int(small.sum())


def _write_settings(source: CheckpointReader, into: Path, kept: list[str]) -> None:
    config = json.loads((source.directory / "config.json").read_text(encoding="utf-8"))
    settings = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    left = sorted([*kept, "lm_head"])
    producer = {"name": "pipeline", "version": "MXFP4 cast"}
    config["quantization_config"] = {
        **settings,
        "quant_method": "modelopt",
        "ignore": left,
        "producer": producer,
    }
    beside = {
        "producer": producer,
        "quantization": {**settings, "kv_cache_quant_algo": None, "exclude_modules": left},
    }
    for name, content in (("config.json", config), ("hf_quant_config.json", beside)):
        (into / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
