"""Both exports, in every format and architecture: complete, repaired, and the same weights in each."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.contracts.checkpoint import CheckpointLayout, check_files
from pipeline.models import Architecture, CheckpointReader, Format, TensorFiles
from pipeline.models.layers import round_e4m3, unpack_rows
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Silent
from pipeline.runtimes.tensorrt.checkpoint import RankCheckpoint, modelopt_export
from pipeline.stages.calibrate import unified
from pipeline.stages.calibrate.calibration import calibrate
from pipeline.stages.calibrate.measurement import check_scales, make_batches, measure
from pipeline.stages.calibrate.model import load
from pipeline.stages.calibrate.third_party import Notes, quietly
from pipeline.stages.dataset.freezing import read_samples
from pipeline.stages.torch_device import torch_threads_for
from tests.support.calibrated import Calibrations, facts, quantization
from tests.support.models import CLASSES

pytestmark = pytest.mark.models

FORMATS = ("fp8", "int4_awq", "w4a8_awq", "int8_sq")
ALGORITHMS = {"fp8": "FP8", "int4_awq": "W4A16_AWQ", "w4a8_awq": "W4A8_AWQ", "int8_sq": "W8A8_SQ_PER_CHANNEL"}
Tensors = dict[str, np.ndarray]


def config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "calibration.json"
    }


@pytest.mark.parametrize("form", FORMATS)
def test_the_hugging_face_export(calibrations: Calibrations, form: str) -> None:
    folder = calibrations.calibrated(form) / "hf"
    checkpoint = CheckpointReader(folder)
    checkpoint.check()
    assert checkpoint.quantization.format == form
    assert checkpoint.quantization.group_size == (64 if "awq" in form else None)
    source = calibrations.source()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    written = config(folder)
    assert written["quantization_config"]["quant_algo"] == ALGORITHMS[form]
    assert written["quantization_config"].get("group_size") == (64 if "awq" in form else None)
    original = config(source)
    assert {key: written[key] for key in original} == original
    assert written["rope_theta"] == original["rope_parameters"]["rope_theta"]
    assert written["rope_scaling"] == {
        k: v for k, v in original["rope_parameters"].items() if k != "rope_theta"
    }
    kept = {
        header.dtype
        for name, header in checkpoint.tensors.headers.items()
        if "norm" in name or "embed" in name
    }
    assert kept == {"BF16"}


# Both keys of the rotary settings (qwen2 has `rope_theta`); but for the last, a calibration is that of the other tests.
ROPES: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in CLASSES),
    ("llama", {"rope_key": "rope_theta"}),
]


@pytest.mark.parametrize(("architecture", "rope"), ROPES)
def test_transformers_reads_the_same_rotary_settings(
    calibrations: Calibrations, architecture: str, rope: dict[str, str]
) -> None:
    from transformers import AutoConfig

    source = calibrations.source(architecture, **rope)
    exported = calibrations.calibrated("fp8", architecture=architecture, **rope) / "hf"
    theirs, ours = (AutoConfig.from_pretrained(folder).rope_parameters for folder in (source, exported))
    assert ours == theirs
    assert Architecture.read(exported) == Architecture.read(source)
    written = config(exported)
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500000.0


@pytest.mark.parametrize("architecture", CLASSES)
def test_the_tensorrt_llm_configuration_is_repaired(calibrations: Calibrations, architecture: str) -> None:
    folder = calibrations.calibrated("fp8", architecture=architecture)
    written = config(folder / "trtllm-tp2")
    assert "rank" not in written
    assert written["mapping"]["world_size"] == written["mapping"]["tp_size"] == 2
    assert written["rotary_base"] == 500000.0
    scaling = written["rotary_scaling"]
    if architecture == "llama":
        assert scaling["type"] == scaling["rope_type"] == "llama3"
        assert (scaling["factor"], scaling["original_max_position_embeddings"]) == (8.0, 256)
    else:
        assert scaling is None
    assert written["architecture"] == CLASSES[architecture]
    qwen = architecture.startswith("qwen")
    assert (written.get("qwen_type"), written.get("seq_length")) == (
        (architecture, 8192) if qwen else (None,) * 2
    )
    assert written["attn_bias"] is (architecture == "qwen2")
    assert written["qk_layernorm"] is (architecture == "qwen3")
    assert written["norm_epsilon"] == 1e-5
    assert written["quantization"]["kv_cache_quant_algo"] is None


# How far weights may be from the source's, relative to their spread.
LIMITS = {"fp8": 0.04, "int4_awq": 0.15, "w4a8_awq": 0.16, "int8_sq": 0.02}
PARTS = {
    "attention.qkv": [f"self_attn.{name}_proj" for name in "qkv"],
    "attention.dense": ["self_attn.o_proj"],
    "mlp.fc": ["mlp.gate_proj"],
    "mlp.gate": ["mlp.up_proj"],
    "mlp.proj": ["mlp.down_proj"],
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_export_holds_the_weights_of_the_source(calibrations: Calibrations, form: str) -> None:
    folder, source = calibrations.calibrated(form), CheckpointReader(calibrations.source())
    hf, ranks = CheckpointReader(folder / "hf"), [_rank(folder / "trtllm-tp2", rank) for rank in range(2)]
    whole = _rank(folder / "trtllm-tp1", 0)
    for layer in range(2):
        for name, sources in PARTS.items():
            names = [f"model.layers.{layer}.{part}" for part in sources]
            wanted, ours = (
                np.concatenate([_effective(model, part) for part in names]) for model in (source, hf)
            )
            theirs = _dequantized(whole, f"transformer.layers.{layer}.{name}", form)
            assert _error(ours, wanted) < LIMITS[form], name
            assert _error(theirs, wanted) < LIMITS[form], name
            # Where smoothing lies in the norm before it, it is rounded there; and gate and up share it there.
            folded = "awq" in form and name not in ("attention.dense", "mlp.proj")
            assert _error(theirs, ours) < (1e-7 if not folded else 0.03 if "qkv" in name else 0.15), name
            split = [_dequantized(rank, f"transformer.layers.{layer}.{name}", form) for rank in ranks]
            np.testing.assert_array_equal(_joined(split, name), theirs)


def _joined(split: list[np.ndarray], name: str) -> np.ndarray:
    """Two ranks put together: by columns, by rows, or (qkv) each its share of q, then of k, then of v."""
    if name in ("attention.dense", "mlp.proj"):
        return np.concatenate(split, axis=1)
    if name != "attention.qkv":
        return np.concatenate(split)
    return np.concatenate(
        [part[rows] for rows in (slice(64), slice(64, 96), slice(96, 128)) for part in split]
    )


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - wanted) ** 2)) / wanted.std())


def _rank(folder: Path, rank: int) -> Tensors:
    return dict(TensorFiles(folder, pattern=f"rank{rank}.safetensors"))


def _effective(checkpoint: CheckpointReader, name: str) -> np.ndarray:
    """The weight with its smoothing and with the norm before it, into which smoothing may be folded."""
    layer = checkpoint.linear(name)
    weight = layer.dequantize()
    if layer.pre_quant_scale is not None:
        weight = weight * layer.pre_quant_scale.astype(np.float32)
    if name.endswith(("o_proj", "down_proj")):
        return weight
    norm = "input_layernorm" if "self_attn" in name else "post_attention_layernorm"
    block = ".".join(name.split(".")[:3])
    return weight * checkpoint.array(f"{block}.{norm}.weight")


def _dequantized(rank: Tensors, name: str, form: str) -> np.ndarray:
    """As `_effective`, of a TensorRT-LLM checkpoint."""
    stored, scale = rank[name + ".weight"], rank[name + ".weights_scaling_factor"].astype(np.float32)
    if form in ("fp8", "int8_sq"):
        weight = stored.astype(np.float32) * (scale if form == "fp8" else scale[:, None])
    else:
        weight = unpack_rows(stored.view(np.uint8)).astype(np.float32) * np.repeat(scale, 64, axis=1)
    if form == "w4a8_awq":
        weight = round_e4m3(weight, float(rank[name + ".weights_scaling_factor_2"][0]))
    if form != "fp8":
        weight = weight * rank[name + ".prequant_scaling_factor"].astype(np.float32)
    if name.endswith(("dense", "proj")):
        return weight
    norm = ".input_layernorm.weight" if name.endswith("qkv") else ".post_layernorm.weight"
    return weight * rank[name.rsplit(".", 2)[0] + norm].astype(np.float32)


def _both(
    calibrations: Calibrations, form: str
) -> tuple[CheckpointReader, CheckpointReader, CheckpointReader]:
    """The source, and both of its exports."""
    folder, source = calibrations.calibrated(form), CheckpointReader(calibrations.source())
    return source, CheckpointReader(folder / "hf"), RankCheckpoint(folder / "trtllm-tp2", source.architecture)


@pytest.mark.parametrize("form", ["int4_awq", "w4a8_awq", "int8_sq"])
def test_weights_are_divided_by_the_smoothing_that_is_stored(calibrations: Calibrations, form: str) -> None:
    """No code is further from its weight than half a step; divided by one smoothing and stored with another, it was."""
    source, *exports = _both(calibrations, form)
    for exported in exports:
        for shape in source.architecture.linears():
            layer, block = exported.linear(shape.name), ".".join(shape.name.split(".")[:3])
            norm = "input_layernorm" if "self_attn" in shape.name else "post_attention_layernorm"
            wanted = source.linear(shape.name).dequantize()
            if layer.pre_quant_scale is not None:
                wanted = wanted / layer.pre_quant_scale.astype(np.float32)
            else:
                before, after = (
                    checkpoint.array(f"{block}.{norm}.weight") for checkpoint in (source, exported)
                )
                wanted = wanted * (before / after)
            steps = wanted / np.repeat(layer.scales(), wanted.shape[1] // layer.scales().shape[1], axis=1)
            assert np.abs(layer.codes() - steps).max() < 0.501, (exported.directory.name, shape.name)


def test_fp8_has_one_scale_where_engines_make_one_layer(calibrations: Calibrations) -> None:
    """Who loads files with several rounds the weights a second time; and so both exports hold the same."""
    source, unified_export, ranks = _both(calibrations, "fp8")
    for layer in range(source.architecture.layers):
        for group in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        ):
            names = [f"model.layers.{layer}.{name}" for name in group]
            assert len({unified_export.linear(name).scales().item() for name in names}) == 1
    for shape in source.architecture.linears():
        first, second = unified_export.linear(shape.name), ranks.linear(shape.name)
        np.testing.assert_array_equal(first.codes(), second.codes(), err_msg=shape.name)
        assert first.scales() == second.scales()


@pytest.mark.parametrize("form", ["fp8", "int4_awq"])
def test_an_fp8_cache(calibrations: Calibrations, form: str) -> None:
    folder = calibrations.calibrated(form, kv_cache="fp8")
    checkpoint = CheckpointReader(folder / "hf")
    assert checkpoint.quantization.kv_cache == "FP8"
    scales = [checkpoint.kv_scales(layer) for layer in range(2)]
    assert all(scale is not None and min(scale) > 0 for scale in scales)
    measured = facts(folder)["scales"]["model.layers.0.self_attn.k_amax"]["max"]
    assert scales[0] is not None
    assert scales[0][0] == pytest.approx(measured / 448, rel=1e-6)
    assert config(folder / "trtllm-tp2")["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert _rank(folder / "trtllm-tp2", 1)["transformer.layers.1.attention.kv_cache_scaling_factor"] >= 1


def test_one_export_does_not_change_the_next(calibrations: Calibrations, tmp_path: Path) -> None:
    """ModelOpt's TensorRT-LLM export merges scales in the model; the others must not see that."""
    both = calibrations.calibrated("fp8", kv_cache="fp8")
    _calibrate(calibrations, "fp8", Parallelism(2), tmp_path, "fp8")
    for export in ("trtllm-tp2", "hf"):
        assert digests(tmp_path / export) == digests(both / export)


def _calibrate(
    calibrations: Calibrations, form: str, size: Parallelism, into: Path, kv_cache: str = "auto"
) -> None:
    calibrate(
        calibrations.source(),
        calibrations.dataset(),
        quantization(form, kv_cache),
        exports=[size],
        into=into,
        progress=Silent(),
        device="cpu",
    )


def test_pipeline_stages_hold_the_layers_of_the_whole(calibrations: Calibrations, tmp_path: Path) -> None:
    whole = calibrations.calibrated("int4_awq")
    _calibrate(calibrations, "int4_awq", Parallelism(2, 2), tmp_path)
    assert digests(tmp_path / "hf") == digests(whole / "hf"), "whatever ranks are exported before it"
    half = config(tmp_path / "trtllm-tp2-pp2")["num_hidden_layers"] // 2
    for rank in range(4):
        found = _rank(tmp_path / "trtllm-tp2-pp2", rank)
        original = _rank(whole / "trtllm-tp2", rank % 2)
        for name in found:
            layer = name.split(".")[2] if ".layers." in name else ""
            moved = int(layer) + (rank // 2) * half if layer.isdigit() else layer
            np.testing.assert_array_equal(found[name], original[name.replace(f".{layer}.", f".{moved}.", 1)])


def test_format_none_is_the_checkpoint_itself(calibrations: Calibrations) -> None:
    folder, source = calibrations.calibrated("none"), calibrations.source()
    assert (folder / "hf/model.safetensors").samefile(source / "model.safetensors")
    assert digests(folder / "hf") == digests(source)
    original, whole = CheckpointReader(source), _rank(folder / "trtllm-tp1", 0)
    got = whole["transformer.layers.1.mlp.fc.weight"]
    assert got.tobytes() == original.tensors["model.layers.1.mlp.gate_proj.weight"].tobytes()
    assert config(folder / "trtllm-tp2")["quantization"]["quant_algo"] is None


def test_tied_embeddings_and_an_odd_vocabulary(calibrations: Calibrations) -> None:
    folder = calibrations.calibrated("int4_awq", architecture="qwen3", tied=True, vocab=501)
    checkpoint = CheckpointReader(folder / "hf")
    checkpoint.check()
    assert "lm_head.weight" not in checkpoint.tensors
    assert config(folder / "hf")["vocab_size"] == 501
    assert config(folder / "trtllm-tp2")["vocab_size"] == 512
    ranks = [_rank(folder / "trtllm-tp2", rank) for rank in range(2)]
    for name in ("lm_head.weight", "transformer.vocab_embedding.weight"):
        table = np.concatenate([rank[name] for rank in ranks])[:501].astype(np.float32)
        np.testing.assert_array_equal(table, checkpoint.array("model.embed_tokens.weight"))


def test_more_ranks_than_key_value_heads(calibrations: Calibrations) -> None:
    folder = calibrations.calibrated("fp8", ranks=(4,))
    shapes = [
        _rank(folder / "trtllm-tp4", rank)["transformer.layers.0.attention.qkv.weight"].shape
        for rank in range(4)
    ]
    assert shapes == [(96, 128)] * 4


def test_a_float32_source_is_stored_in_float16_for_tensorrt_llm(calibrations: Calibrations) -> None:
    folder = calibrations.calibrated("fp8", dtype="float32")
    assert config(folder / "trtllm-tp1")["dtype"] == "float16"
    assert CheckpointReader(folder / "hf").tensors.headers["model.norm.weight"].dtype == "F32"


def test_nvfp4_is_exported_as_it_is_read(calibrations: Calibrations, tmp_path: Path) -> None:
    source, samples = calibrations.source(), read_samples(calibrations.dataset() / "calibration.jsonl", 512)
    architecture, original = Architecture.read(source), CheckpointReader(source)
    with quietly("nvfp4", Notes()), torch_threads_for(0):
        model = load(source, architecture, "cpu")
        measure(
            model,
            Format.NVFP4,
            awq_block_size=64,
            kv_cache="fp8",
            batches=make_batches(samples, 500),
            progress=Silent(),
        )
        assert len(check_scales(model, architecture, Format.NVFP4, "fp8")) == 14 * 2 + 2 * 2
        unified.align(model, torch.bfloat16)
        modelopt_export.export(model, architecture, Parallelism(2), tmp_path / "ranks")
        unified.export(model, source, tmp_path / "hf")
    check_files(tmp_path / "ranks", CheckpointLayout(architecture, "BF16", Format.NVFP4, 16, "fp8", tensor=2))
    unified.judge(tmp_path / "hf", Format.NVFP4, 16, "fp8", {})
    exported, ranks = CheckpointReader(tmp_path / "hf"), RankCheckpoint(tmp_path / "ranks", architecture)
    for shape in architecture.linears():
        first, second = exported.linear(shape.name), ranks.linear(shape.name)
        np.testing.assert_array_equal(first.dequantize(), second.dequantize(), err_msg=shape.name)
        assert (
            _error(exported.linear(shape.name).dequantize(), original.linear(shape.name).dequantize()) < 0.11
        )
