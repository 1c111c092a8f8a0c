"""The unified Hugging Face checkpoint: what ModelOpt writes, repaired, and judged by its files.

Repaired: `quantization_config` lacks the group size (AWQ) and the name of the cache's format; the
configuration lacks `rope_theta` and `rope_scaling`, which engines that are older than transformers 5 read;
the tokenizer is not written. ModelOpt is told to export in float32, and what is not quantized is stored in
the type of the source afterwards: exporting in bfloat16 rounds weights to it before rounding them to FP8,
which moves 3 to 5 % of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import StageError
from pipeline.models import Architecture, CheckpointReader, Format
from pipeline.models.quantization import AWQ
from pipeline.models.rope import rope_settings
from pipeline.models.tensors import read_headers
from pipeline.stages.calibrate.measurement import layer_format
from pipeline.stages.calibrate.model import SparseMoeBlock

# Everything of a checkpoint that is neither weights nor their index.
COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt")
_NOT_COMPANIONS = ("config.json", "model.safetensors.index.json", "hf_quant_config.json")
_ADDED_TO_CONFIG = (
    "group_size", "has_zero_point", "pre_quant_scale", "kv_cache_quant_algo", "quantized_layers",
)  # fmt: skip


def export(model: Any, source: Path, into: Path) -> None:
    """Write the checkpoint of a calibrated model. It is the last export: ModelOpt packs the weights in place.

    Args:
        source: The checkpoint that was calibrated, whose configuration and tokenizer are taken over.
    """
    from modelopt.torch.export import export_hf_checkpoint

    dtype = getattr(torch, Architecture.read(source).dtype)
    with torch.inference_mode():
        fold(model, dtype)
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=into)
    for file in sorted(into.glob("*.safetensors")):
        _store_as(file, dtype)
    _repair_config(source, into)
    copy_companions(source, into)


def link(source: Path, into: Path) -> None:
    """Hard-link the files of the source into a folder, for format `none`; copy them between file systems."""
    into.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in ("manifest.json", "manifest.txt"):
            try:
                (into / file.name).hardlink_to(file)
            except OSError:
                shutil.copyfile(file, into / file.name)


def judge(
    directory: Path, form: Format, group_size: int | None, kv_cache: str, chosen: Mapping[str, Format]
) -> None:
    """Read every file of an export again.

    Args:
        chosen: Layer -> its format, for AUTO.

    Raises:
        StageError: Format, group size or KV cache are not those that were asked for, or the tokenizer is missing.
        CheckpointError: A file is damaged.
    """
    checkpoint = CheckpointReader(directory)
    checkpoint.check()
    quantization = checkpoint.quantization
    expected = (form, group_size, "FP8" if kv_cache == "fp8" else None)
    stored = (quantization.format, quantization.group_size, quantization.kv_cache)
    if form is Format.AUTO:
        wrong = [
            name
            for name, chosen_format in chosen.items()
            if quantization.format_of(name) is not chosen_format
        ]
        if wrong or quantization.kv_cache != expected[2]:
            raise StageError(
                f"{directory} has other formats than were chosen: {', '.join(wrong) or 'KV cache'}"
            )
    elif stored != expected:
        raise StageError(f"{directory} is {quantization}, not {expected}")
    missing = [name for name in ("tokenizer.json",) if not (directory / name).exists()]
    if missing:
        raise StageError(f"{directory} lacks {', '.join(missing)}")


def copy_companions(source: Path, into: Path) -> None:
    """Copy tokenizer, chat template and generation settings as the source has them."""
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.name not in _NOT_COMPANIONS and not file.name.startswith("manifest."):
                shutil.copyfile(file, into / file.name)


def _store_as(file: Path, dtype: torch.dtype) -> None:
    """Cast what is not quantized and is no scale; names in order, so that equal tensors make equal files."""
    from safetensors.torch import load_file, save_file

    scales = ("weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale")
    plain = {header.name for header in read_headers(file) if header.dtype in ("F32", "F16", "BF16")}
    plain = {name for name in plain if not name.endswith(scales)}
    tensors = load_file(file)
    kept = {name: value.to(dtype) if name in plain else value for name, value in sorted(tensors.items())}
    save_file(kept, file, metadata={"format": "pt"})
    index = file.parent / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        sizes = [
            header.end - header.begin
            for part in file.parent.glob("*.safetensors")
            for header in read_headers(part)
        ]
        content["metadata"] = {**content.get("metadata", {}), "total_size": sum(sizes)}
        write_json(index, content)


def _repair_config(source: Path, into: Path) -> None:
    """The source's own configuration, with the quantization and both spellings of the rotary settings."""
    exported = json.loads((into / "config.json").read_text(encoding="utf-8"))
    details = json.loads((into / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
    quantization = dict(exported["quantization_config"])
    for key in _ADDED_TO_CONFIG:
        if details.get(key) is not None:
            quantization.setdefault(key, details[key])
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_json(into / "config.json", {**with_both_ropes(config), "quantization_config": quantization})


def with_both_ropes(config: dict[str, Any]) -> dict[str, Any]:
    """Give a config.json both `rope_parameters` (transformers 5) and `rope_theta`, `rope_scaling` (all before)."""
    settings = rope_settings(config)
    if "rope_theta" not in settings:
        return config
    scaling = {key: value for key, value in settings.items() if key != "rope_theta"}
    scaled = scaling if settings["rope_type"] != "default" else None
    return {
        **config,
        "rope_parameters": settings,
        "rope_theta": settings["rope_theta"],
        "rope_scaling": scaled,
    }


def write_json(path: Path, content: Any) -> None:
    """Write JSON with two spaces and a line break at the end."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


# One scale and one smoothing for what engines make one layer
#
# ModelOpt 0.47's exports leave two errors. In FP8, its Hugging Face export gives q, k and v scales of their own, and
# gate and up as well: TensorRT-LLM's PyTorch backend, like others, then rounds the weights again, with the largest of
# them (_torch/modules/linear.py, FP8QDQLinearMethod.load_weights_fused_qkv_linear). And weights are divided by a
# smoothing in float32, which is stored in the 16 bits of the model, beside the layer or multiplied into the norm before
# it: the two do not cancel, by up to 0.9 of a step of INT8.

# Of gate and up: engines multiply them in one. The Hugging Face export puts the smoothing of AWQ into the norm.
_ONE_SCALE = (Format.FP8, Format.NVFP4, Format.W4A16_NVFP4)


@torch.no_grad()
def align(model: Any, dtype: torch.dtype) -> None:
    """Before any export, in place: q, k and v alike; gate and up, too, where engines want it; smoothing as stored.

    Args:
        dtype: The 16-bit type in which a TensorRT-LLM checkpoint holds smoothing.
    """
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    for layer in model.model.layers:
        for norm, modules in _sharing_an_input(layer):
            if layer_format(modules[0]) in _ONE_SCALE or norm is layer.input_layernorm:
                preprocess_linear_fusion(modules)
    for module in model.modules():
        _round(module, dtype)


@torch.no_grad()
def fold(model: Any, dtype: torch.dtype) -> None:
    """Before the Hugging Face export, in place: one smoothing for all that read the same norm, as it is stored there.

    Args:
        dtype: Type of the checkpoint's norms and smoothing.
    """
    from modelopt.torch.export.quant_utils import preprocess_linear_fusion

    for layer in model.model.layers:
        for norm, modules in _sharing_an_input(layer):
            preprocess_linear_fusion(modules)
            if layer_format(modules[0]) in AWQ:
                _into_norm(norm, modules, dtype)
            for module in modules:
                _round(module, dtype)


def _sharing_an_input(layer: Any) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Linear layers of a decoder layer that engines make one, with the norm that they read.

    Layers that are stored as one (Phi-3) have one scale anyway; no format that smooths is made of them, or of experts.
    """
    attention = layer.self_attn
    norm = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
    if hasattr(attention, "q_proj"):
        yield layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
    if isinstance(layer.mlp, SparseMoeBlock):
        yield from (
            (norm, [getattr(expert, name) for name in layer.mlp.names[:2]]) for expert in layer.mlp.experts
        )
    elif hasattr(layer.mlp, "gate_proj"):
        yield norm, [layer.mlp.gate_proj, layer.mlp.up_proj]


def _smoothing(module: Any) -> Tensor | None:
    """[in]: what multiplies the inputs of a linear layer; None if nothing does."""
    scale: Tensor | None = getattr(getattr(module, "input_quantizer", None), "_pre_quant_scale", None)
    return scale


def _round(module: Any, dtype: torch.dtype) -> None:
    """Give a layer the smoothing that `dtype` can hold."""
    smoothing = _smoothing(module)
    if smoothing is not None:
        _smooth(module, smoothing.to(dtype))


def _into_norm(norm: Any, modules: list[nn.Module], dtype: torch.dtype) -> None:
    """Multiply the smoothing into the norm, and divide the weights by the factors after rounding."""
    smoothing = _smoothing(modules[0])
    assert smoothing is not None, "the caller looked"
    plus = 1 if "Gemma" in type(norm).__name__ else 0  # these multiply by 1 + weight
    smoothing, before = smoothing.float(), norm.weight.float() + plus
    after = (before * smoothing - plus).to(dtype).float()
    kept = (after + plus) / before
    kept = torch.where(torch.isfinite(kept) & (kept > 0), kept, smoothing)
    for module in modules:
        _smooth(module, kept, beside=torch.ones_like(kept))
    norm.weight = nn.Parameter(after.to(norm.weight.dtype), requires_grad=False)


def _smooth(module: Any, smoothing: Tensor, beside: Tensor | None = None) -> None:
    """Divide the weights by another smoothing, and measure their scales again.

    Args:
        smoothing: [in].
        beside: Smoothing that stays with the layer, if not all of it; [in].
    """
    from modelopt.torch.quantization.model_calib import enable_stats_collection, finish_stats_collection

    now = _smoothing(module)
    assert now is not None, "the caller looked"
    beside = smoothing if beside is None else beside
    if torch.equal(now.float(), smoothing.float()) and torch.equal(now.float(), beside.float()):
        return
    weight = module.weight.float() * now.float() / smoothing.float()
    module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
    now.copy_(beside)
    module.weight_quantizer.reset_amax()
    enable_stats_collection(module.weight_quantizer)
    module.weight_quantizer(module.weight)
    finish_stats_collection(module.weight_quantizer)
