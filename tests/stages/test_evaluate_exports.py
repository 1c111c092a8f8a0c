"""Whole evaluations of exported checkpoints; and damaged ones, which are refused or fail the gate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.checkpoint import TensorFiles
from pipeline.errors import CheckpointError, StageError
from pipeline.progress import Silent
from pipeline.recipe import Gate
from pipeline.stages.evaluate import Metrics, evaluate, judge, read_metrics
from tests.support.calibrated import TRAINED, Calibrations

Tensors = dict[str, np.ndarray]
LAYER = "model.layers.1.mlp.down_proj"
GATE = Gate(max_perplexity_increase=0.02, min_top1_agreement=0.97, max_kl=0.01)


def evaluated(calibrations: Calibrations, exported: Path, into: Path) -> Metrics:
    """Of an export of the trained target of the recipes."""
    into.mkdir(parents=True, exist_ok=True)
    heldout = calibrations.trained_dataset() / "heldout.jsonl"
    evaluate(TRAINED, exported, heldout, into=into, progress=Silent(), device="cpu")
    return read_metrics(into)


@pytest.mark.parametrize("form", ["fp8", "int8_sq", "int4_awq", "w4a8_awq"])
def test_every_format_stays_near_the_original(calibrations: Calibrations, tmp_path: Path, form: str) -> None:
    metrics = evaluated(calibrations, calibrations.trained(form) / "hf", tmp_path)
    lines = (calibrations.trained_dataset() / "heldout.jsonl").read_text().splitlines()
    samples = [json.loads(line)["tokens"] for line in lines]
    assert metrics.positions == sum(len(sample) - 1 for sample in samples)
    assert metrics.format == form
    assert metrics.calibration_samples == 24
    assert 0 < metrics.mean_kl.value < 0.2
    assert metrics.mean_kl.value < metrics.p99_kl <= metrics.max_kl
    assert metrics.worst[0].kl == metrics.max_kl
    assert judge(metrics, GATE).passed, judge(metrics, GATE)


def test_format_none_is_the_original(calibrations: Calibrations, tmp_path: Path) -> None:
    metrics = evaluated(calibrations, calibrations.trained("none") / "hf", tmp_path)
    assert metrics.top1_agreement.value == 1
    assert metrics.mean_kl.value < 1e-9
    assert metrics.perplexity_increase.value == 0
    assert metrics.worst == ()
    assert judge(metrics, Gate(max_perplexity_increase=0, min_top1_agreement=1)).passed


def test_the_same_files_give_the_same_bytes(calibrations: Calibrations, tmp_path: Path) -> None:
    for name in ("one", "two"):
        evaluated(calibrations, calibrations.trained("fp8") / "hf", tmp_path / name)
    assert (tmp_path / "one/metrics.json").read_bytes() == (tmp_path / "two/metrics.json").read_bytes()


def test_smoother_formats_are_nearer(calibrations: Calibrations, tmp_path: Path) -> None:
    kl = {
        name: evaluated(calibrations, calibrations.trained(form, kv) / "hf", tmp_path / name).mean_kl.value
        for name, form, kv in (("fp8", "fp8", "auto"), ("cache", "fp8", "fp8"), ("int4", "int4_awq", "auto"))
    }
    assert kl["fp8"] < kl["cache"] < kl["int4"]


@pytest.fixture
def damaged(calibrations: Calibrations, tmp_path: Path) -> Callable[..., Path]:
    def make(form: str, damage: Callable[[Tensors], object]) -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(calibrations.trained(form) / "hf", folder)
        tensors = {name: np.array(value) for name, value in TensorFiles(folder).items()}
        damage(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.mark.parametrize("form", ["fp8", "int4_awq", "w4a8_awq", "int8_sq"])
def test_a_scale_that_is_gone_is_refused(
    calibrations: Calibrations, damaged: Callable[..., Path], tmp_path: Path, form: str
) -> None:
    folder = damaged(form, lambda tensors: tensors.pop(LAYER + ".weight_scale"))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale is missing"):
        evaluated(calibrations, folder, tmp_path / "into")


def _swap_nibbles(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = (tensors[name] << 4) | (tensors[name] >> 4)


def _shuffle_groups(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = np.ascontiguousarray(tensors[name][::-1])


def _times(part: str, factor: float) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith(part)]:
            tensors[name] = np.array(tensors[name] * np.float32(factor), tensors[name].dtype)

    damage.__name__ = f"{part} times {factor}"
    return damage


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        ("int4_awq", _swap_nibbles),
        ("w4a8_awq", _swap_nibbles),
        ("int4_awq", _shuffle_groups),
        ("int8_sq", _shuffle_groups),
        ("int4_awq", _times("pre_quant_scale", 2)),
        ("fp8", _times("weight_scale", 2)),
        ("fp8", _times("input_scale", 0.02)),
        ("w4a8_awq", _times("weight_scale_2", 0.02)),
        ("int8_sq", _times("input_scale", 0.05)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_scales_and_weights_that_do_not_belong_together_fail_the_gate(
    calibrations: Calibrations,
    damaged: Callable[..., Path],
    tmp_path: Path,
    form: str,
    damage: Callable[[Tensors], object],
) -> None:
    metrics = evaluated(calibrations, damaged(form, damage), tmp_path / "into")
    verdict = judge(metrics, GATE)
    assert not verdict.passed
    assert verdict.advice


def test_another_group_size_is_refused(
    calibrations: Calibrations, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    folder = damaged("int4_awq", len)
    for name in ("config.json", "hf_quant_config.json"):
        text = (folder / name).read_text().replace('"group_size": 64', '"group_size": 128')
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match="weight_scale has shape"):
        evaluated(calibrations, folder, tmp_path / "into")


def test_another_model_is_refused(calibrations: Calibrations, tmp_path: Path) -> None:
    other = calibrations.source("qwen3")
    with pytest.raises(CheckpointError, match=r"is not the model of .*hidden 256 and 128"):
        evaluated(calibrations, other, tmp_path)


def test_values_that_overflow_are_named_with_their_layer(
    calibrations: Calibrations, damaged: Callable[..., Path], tmp_path: Path
) -> None:
    def damage(tensors: Tensors) -> None:
        tensors[LAYER + ".weight_scale"] = np.array(3e38, np.float32)

    with pytest.raises(StageError, match="layer 1 computes values that are not finite"):
        evaluated(calibrations, damaged("fp8", damage), tmp_path / "into")


def test_held_out_text_that_does_not_fit(calibrations: Calibrations, tmp_path: Path) -> None:
    for line in ('{"tokens":[1]}', '{"tokens":[1,600]}', ""):
        (tmp_path / "heldout.jsonl").write_text(line)
        source = calibrations.source()
        with pytest.raises(StageError, match=r"heldout\.jsonl"):
            evaluate(
                source, source, tmp_path / "heldout.jsonl", into=tmp_path, progress=Silent(), device="cpu"
            )
