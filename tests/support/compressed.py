"""Checkpoints of compressed-tensors: of random codes and scales, and what its own library makes of a few layers.

PYTHONPATH=. python -m tests.support.compressed    # with compressed-tensors installed: records them again
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

RECORDED = Path(__file__).with_name("compressed.safetensors")  # by compressed-tensors 0.20.1
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ROWS, COLUMNS = 16, 64
TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}


def _scheme(packing: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    settings = {"symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": settings, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": packing, "config_groups": {"group_0": group}}


_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FP8 = {"num_bits": 8, "type": "float"}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_NVFP4 = _FP4 | {"strategy": "tensor_group", "group_size": 16}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
SCHEMES = {
    "w4a16": _scheme("pack-quantized", **_INT4),
    "w4a16-rows": _scheme("pack-quantized", **_INT4 | {"strategy": "channel", "group_size": None}),
    "w4a16-zeros": _scheme("pack-quantized", **_INT4 | {"symmetric": False}),
    "w4a16-ordered": _scheme("pack-quantized", **_INT4 | {"actorder": "group"}),
    "w8a16": _scheme("pack-quantized", **_INT4 | {"num_bits": 8}),
    "w8a8": _scheme("int-quantized", TOKEN | {"num_bits": 8, "type": "int"}, **_INT8),
    "fp8-dynamic": _scheme("float-quantized", TOKEN | _FP8, **_FP8, strategy="channel"),
    "fp8": _scheme("float-quantized", _FP8 | {"dynamic": False, "strategy": "tensor"}, **_FP8, strategy="tensor"),
    "nvfp4a16": _scheme("nvfp4-pack-quantized", **_NVFP4),
    "mxfp4a16": _scheme("mxfp4-pack-quantized", **_FP4),
}  # fmt: skip


def random_layer(scheme: str, rows: int, columns: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Tensors of a layer: any codes, and scales with which its weights are of the usual size."""
    weights = SCHEMES[scheme]["config_groups"]["group_0"]["weights"]
    groups = columns // (weights.get("group_size") or columns)
    bits, largest = weights["num_bits"], {"int": 2 ** (weights["num_bits"] - 1)}.get(weights["type"], 448)

    def scales(*shape: int) -> np.ndarray:
        return (random.uniform(0.05, 0.1, shape) / largest).astype(BF16)

    if "pack-quantized" in SCHEMES[scheme]["format"]:
        if weights["type"] == "float":
            parts = {"weight_packed": random.integers(0, 256, (rows, columns // 2), np.uint8)}
            if scheme.startswith("nvfp4"):
                parts["weight_scale"] = random.uniform(100, 448, (rows, groups)).astype(E4M3)
                parts["weight_global_scale"] = np.array([448 * 6 / 0.1], np.float32)
            else:
                parts["weight_scale"] = random.integers(118, 122, (rows, groups), np.uint8)
            return parts
        words = random.integers(-(2**31), 2**31, (rows, columns * bits // 32), np.int64).astype(np.int32)
        parts = {"weight_packed": words, "weight_scale": scales(rows, groups)}
        parts["weight_shape"] = np.array([rows, columns], np.int64)
        if not weights["symmetric"]:
            zeros = random.integers(-(2**31), 2**31, (-(-rows // 8), groups), np.int64)
            parts["weight_zero_point"] = zeros.astype(np.int32)
        if weights.get("actorder") == "group":
            parts["weight_g_idx"] = random.permutation(np.arange(columns) % groups).astype(np.int32)
        return parts
    if weights["type"] == "int":
        codes: np.ndarray = random.integers(-127, 128, (rows, columns), np.int8)
    else:
        codes = random.uniform(-448, 448, (rows, columns)).astype(E4M3)
    parts = {
        "weight": codes,
        "weight_scale": scales(rows, 1) if weights["strategy"] == "channel" else scales(1),
    }
    if scheme == "fp8":
        parts["input_scale"] = np.array([0.02], BF16)
    return parts


def compressed_checkpoint(source: Path, into: Path, scheme: str, seed: int = 0) -> Path:
    """Write a checkpoint like `source` whose linear layers are random ones of a scheme; the head is left alone."""
    into.mkdir(parents=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, into / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = SCHEMES[scheme] | {"ignore": ["lm_head"]}
    (into / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, value in load_file(source / "model.safetensors").items():
        layer, part = name.rsplit(".", 1)
        if part == "weight" and layer.endswith("_proj"):
            parts = random_layer(scheme, *value.shape, random)
            tensors |= {f"{layer}.{key}": array for key, array in parts.items()}
        else:
            tensors[name] = value
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


def record() -> None:
    """Have the library decompress one layer of each scheme, with the columns' groups as its kernels have them."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    recorded = dict[str, Any]()
    for number, (scheme, settings) in enumerate(SCHEMES.items()):
        group = settings["config_groups"]["group_0"]
        parts = random_layer(scheme, ROWS, COLUMNS, np.random.default_rng(number))
        given = {key: _torch(value) for key, value in parts.items()}
        inputs = group["input_activations"]
        told = QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(
                **{key: weight for key, weight in group["weights"].items() if key != "actorder"}
            ),
            input_activations=inputs and QuantizationArgs(**inputs),
        )
        order = given.pop("weight_g_idx", None)
        if (
            order is not None
        ):  # decompression takes neighbours for a group: sorted, and put back where they were
            words, place = given["weight_packed"], torch.argsort(order, stable=True)
            compressor: Any = BaseCompressor.get_value_from_registry(settings["format"])
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

            codes = unpack_from_int32(words, 4, torch.Size((ROWS, COLUMNS)))
            given["weight_packed"] = pack_to_int32(codes[:, place].contiguous(), 4)
            weight = torch.empty(ROWS, COLUMNS)
            weight[:, place] = compressor.decompress(given, told)["weight"].float()
        else:
            compressor = BaseCompressor.get_value_from_registry(settings["format"])
            weight = compressor.decompress(given, told)["weight"].float()
        recorded |= {f"{scheme}/{key}": value for key, value in parts.items()}
        recorded[f"{scheme}/expected"] = weight.numpy()
    save_file(recorded, RECORDED)


def _torch(array: np.ndarray) -> Any:
    import torch

    bits = {BF16: (np.int16, torch.bfloat16), E4M3: (np.uint8, torch.float8_e4m3fn)}.get(array.dtype)
    return (
        torch.from_numpy(array.copy())
        if bits is None
        else torch.from_numpy(array.view(bits[0]).copy()).view(bits[1])
    )


if __name__ == "__main__":
    record()
