"""MXFP4 weights as NVFP4 ones, without calibrating them: the codes stay what they are, and scales are written anew.

A block of 32 weights with the scale 2^k becomes two of 16 whose e4m3 scales are 2^(k - m), below one scale 2^m for the
whole matrix. With m = k_max - 8 that is exact for all blocks whose k is at most 17 below the largest, for e4m3 holds
the powers from 2^-9 to 2^8. Weights of smaller blocks are rounded once more, and blocks that this changes are counted.
Layers that engines compute as one share m, and so do all experts of a layer that lie in one tensor. The formula is
ModelOpt 0.47's (torch/quantization/utils/numeric_utils.py).

NVFP4 that rounds inputs, too, needs the largest input of each layer: `largest_inputs` reads samples by the checkpoint's
own files, a layer at a time. Layers that are not in MXFP4 stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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

FORMATS = (Format.W4A16_NVFP4, Format.NVFP4)  # that MXFP4 is cast to
_BIAS, _MOST, _LEAST = 127, 8, -9  # of e8m0; exponents of e4m3 that are powers of two
_BLOCK_BYTES = 16
_LARGEST = np.float32(448 * 6)  # e4m3 times e2m1
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def can_cast(source: CheckpointReader) -> bool:
    """Whether a checkpoint is in MXFP4 alone, and no decoder below a tower for images."""
    return source.quantization.format is Format.MXFP4 and isinstance(source.tensors, TensorFiles)


def largest_inputs(
    source: CheckpointReader, samples: Sequence[Sequence[int]], device: str, progress: Progress
) -> dict[str, float]:
    """Map the layers of a checkpoint to the largest magnitude of their inputs over samples."""
    from pipeline.stages.evaluate.decoder import Decoder

    decoder = Decoder(source, samples, device, observe=True)
    with progress.task("measure inputs", decoder.layers, "layers") as task:
        decoder.hidden_states(task.advance)
    return decoder.largest_inputs


def cast(
    source: CheckpointReader, into: Path, inputs: Mapping[str, float] | None, progress: Progress
) -> dict[str, Json]:
    """Write a checkpoint that `can_cast` as ModelOpt writes NVFP4.

    Args:
        into: Folder; gets the tensors, config.json and hf_quant_config.json.
        inputs: Layer -> largest magnitude of its inputs, for NVFP4; None: inputs are not rounded (W4A16_NVFP4).

    Returns:
        Number of blocks, of those that are not exact, and the layers that these are in.
    """
    assert isinstance(source.tensors, TensorFiles), "it was read from files"
    into.mkdir(parents=True)
    architecture, packed = source.architecture, source.quantization.compressed
    layers = [shape.name for shape in (*architecture.linears(), *architecture.stacked_experts())]
    kept = [name for name in layers if source.quantization.format_of(name) is Format.NONE]
    ends = [f".{part}" for part in (*PARTS, "weight_scale")] if packed else ["_blocks", "_scales"]
    written = {f"{name}{end}": name for name in layers if name not in kept for end in ends}
    by_file: dict[Path, list[str]] = {}
    for header in source.tensors.headers.values():
        by_file.setdefault(header.file, []).append(header.name)
    blocks, inexact, placed = 0, dict[str, int](), dict[str, str]()
    with progress.task("cast MXFP4 to NVFP4", len(layers) - len(kept), "layers") as task:
        for file, names in sorted(by_file.items()):
            tensors = {name: source.tensors[name] for name in names if name not in written}
            for name in names:
                if name.endswith(("_blocks", ".weight_packed")) and name in written:
                    layer = written[name]
                    parts, count, wrong = _layer(source, layer)
                    if inputs is not None:
                        parts["input_scale"] = np.array(inputs[layer] / _LARGEST, np.float32)
                    tensors |= _named(layer, parts, stacked=not packed)
                    blocks += count
                    inexact |= {layer: wrong} if wrong else {}
                    task.advance(1)
            ordered = {key: np.array(value, order="C") for key, value in tensors.items()}
            save_file(ordered, into / file.name, {"format": "pt"})
            placed |= dict.fromkeys(tensors, file.name)
    if len(by_file) > 1:
        index = {"metadata": {}, "weight_map": dict(sorted(placed.items()))}
        (into / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n", encoding="utf-8"
        )
    _write_settings(source, into, kept, "W4A16_NVFP4" if inputs is None else "NVFP4")
    return {"blocks": blocks, "inexact_blocks": sum(inexact.values()), "inexact_layers": list(inexact)}


def _layer(source: CheckpointReader, layer: str) -> tuple[dict[str, Array], int, int]:
    """Tensors of a layer as NVFP4, [..., out, in / 2] and so on; how many blocks it has, and how many are not exact."""
    exponents = _exponents(source, layer)
    scale = max(int(_exponents(source, joined).max()) for joined in _joined(layer)) - _MOST
    name = f"{layer}.weight_packed" if source.quantization.compressed else f"{layer}_blocks"
    codes = np.asarray(source.tensors[name]).reshape(*exponents.shape, _BLOCK_BYTES)
    stored = np.maximum(exponents - scale, _LEAST)
    small, wrong = exponents - scale < stored, 0
    if small.any():
        values = unpack_e2m1(codes[small]) * np.ldexp(1.0, (exponents - scale - stored)[small])[:, None]
        nearest = np.abs(np.abs(values)[..., None] - E2M1[:8]).argmin(axis=-1)
        nearest = (nearest + np.where(np.signbit(values), 8, 0)).astype(np.uint8)
        wrong = int((E2M1[nearest] != values).any(axis=-1).sum())
        codes = codes.copy()
        codes[small] = nearest[:, 0::2] | (nearest[:, 1::2] << 4)
    steps = np.repeat(np.ldexp(np.float32(1), stored).astype(ml_dtypes.float8_e4m3fn), 2, axis=-1)
    parts = {
        "weight": codes.reshape(*exponents.shape[:-1], -1),
        "weight_scale": steps,
        "weight_scale_2": np.array(2.0**scale, np.float32),
    }
    return parts, exponents.size, wrong


def _named(layer: str, parts: Mapping[str, Array], *, stacked: bool) -> dict[str, Array]:
    """Tensors by their names; those of all experts are stored transposed."""
    if not stacked:
        return {f"{layer}.{part}": value for part, value in parts.items()}
    turned = {part: value.swapaxes(1, 2) if value.ndim == 3 else value for part, value in parts.items()}
    return {layer if part == "weight" else f"{layer}_{part}": value for part, value in turned.items()}


def _exponents(source: CheckpointReader, layer: str) -> Array:
    """k of each block, [..., out, in / 32]."""
    name = f"{layer}.weight_scale" if source.quantization.compressed else f"{layer}_scales"
    stored: Array = source.tensors[name].view(np.uint8).astype(np.int32) - _BIAS
    return stored


def _joined(layer: str) -> Iterator[str]:
    head, _, last = layer.rpartition(".")
    names = next((group for group in _TOGETHER if last in group), (last,))
    yield from (f"{head}.{name}" for name in names)


def _write_settings(source: CheckpointReader, into: Path, kept: list[str], algorithm: str) -> None:
    config = json.loads((source.directory / "config.json").read_text(encoding="utf-8"))
    settings = {"quant_algo": algorithm, "group_size": 16}
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
