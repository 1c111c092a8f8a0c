"""Damaged checkpoints: everything that is wrong is named, and nothing is read from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.errors import CheckpointError
from pipeline.models import CheckpointReader, TensorFiles
from tests.support.models import make_checkpoint, quantize_checkpoint

BLOCK = "model.layers.1.self_attn."
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """Each checkpoint is made once."""
    folder = tmp_path_factory.mktemp("quantized")
    source = make_checkpoint(folder / "source", hidden=128, heads=4, head_dim=32, intermediate=256)
    return cache(lambda form, kv: quantize_checkpoint(source, folder / f"{form}{kv}", form, kv_cache=kv))


@pytest.fixture
def make(tmp_path: Path, quantized: Callable[[str, bool], Path]) -> Callable[..., Path]:
    def made(form: str, damage: Callable[[Tensors], object] = len, kv_cache: bool = False) -> Path:
        whole, folder = quantized(form, kv_cache), tmp_path / form
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        tensors = {name: np.array(value) for name, value in TensorFiles(whole).items()}
        damage(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return made


@pytest.mark.parametrize("form", ["fp8", "int4_awq", "w4a8_awq", "int8_sq"])
def test_each_scale_that_is_missing_is_named(make: Callable[..., Path], form: str) -> None:
    whole = CheckpointReader(make(form, kv_cache=True))
    assert whole.faults() == []
    scales = [name for name in whole.tensors if "layers.0" in name and "scale" in name]
    assert len(scales) >= 8
    for name in scales:
        folder = make(form, lambda tensors, name=name: tensors.pop(name), kv_cache=True)
        assert f"{name} is missing" in CheckpointReader(folder).faults(), name


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda t: t.update({BLOCK + "q_proj.weight_scale": np.array(-1, np.float32)}), "not positive"),
        (lambda t: t.update({BLOCK + "q_proj.weight_scale": np.array(np.nan, np.float32)}), "not finite"),
        (lambda t: t.update({BLOCK + "q_proj.weight_scale": np.ones(3, np.float32)}), "has shape [3], not []"),
        (lambda t: t.update({BLOCK + "q_proj.weight": np.ones((128, 128), np.float32)}), "is F32, not F8_E4M3"),
        (lambda t: t.update({BLOCK + "q_proj.weight": t[BLOCK + "q_proj.weight"][1:]}), "has shape [127, 128]"),
        (lambda t: t.update({BLOCK + "q_proj.pre_quant_scale": np.ones(128, np.float32)}), "not expected in fp8"),
        (lambda t: t.update({"model.layers.7.mlp.up_proj.weight": np.ones(3, np.float32)}), "is not expected"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    ],
)  # fmt: skip
def test_other_damage(make: Callable[..., Path], damage: Callable[[Tensors], object], fault: str) -> None:
    faults = CheckpointReader(make("fp8", damage)).faults()
    assert any(fault in text for text in faults), faults
    with pytest.raises(CheckpointError):
        CheckpointReader(make("fp8", damage)).check()


def test_a_damaged_layer_cannot_be_read(make: Callable[..., Path]) -> None:
    checkpoint = CheckpointReader(make("fp8", lambda tensors: tensors.pop(BLOCK + "o_proj.input_scale")))
    checkpoint.linear(BLOCK + "q_proj")
    with pytest.raises(CheckpointError, match=r"o_proj\.input_scale is missing"):
        checkpoint.linear(BLOCK + "o_proj")


def test_scales_of_another_group_size(make: Callable[..., Path]) -> None:
    folder = make("int4_awq")
    path = folder / "hf_quant_config.json"
    content = json.loads(path.read_text())
    content["quantization"]["group_size"] = 32
    path.write_text(json.dumps(content))
    assert any("weight_scale has shape" in fault for fault in CheckpointReader(folder).faults())


def test_layers_with_one_input_are_smoothed_together(make: Callable[..., Path]) -> None:
    folder = make(
        "int4_awq", lambda t: t.update({BLOCK + "k_proj.pre_quant_scale": np.ones(128, np.float32)})
    )
    assert any("only some of self_attn.q_proj" in fault for fault in CheckpointReader(folder).faults())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"quant_algo": "W3A3"}, "W3A3"),
        ({"quant_algo": "W4A16_AWQ"}, "group_size"),
    ],
)
def test_quantization_that_is_not_understood(tmp_path: Path, content: dict, message: str) -> None:
    folder = make_checkpoint(tmp_path, hidden=128, heads=4, head_dim=32)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": content}))
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(folder)


def test_another_tool_s_quantization_and_files_that_disagree(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, hidden=128, heads=4, head_dim=32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(CheckpointError, match="gptq"):
        CheckpointReader(folder)
    ours = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": ours}))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(CheckpointError, match=r"'FP8', hf_quant_config\.json says 'NVFP4'"):
        CheckpointReader(folder)
