"""Mixtral and Phi-3 from calibration to rank files: experts and fused projections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.models import Architecture, CheckpointReader, Format, TensorFiles
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Silent
from pipeline.runtimes.tensorrt.checkpoint import modelopt_export
from pipeline.stages.calibrate.measurement import make_batches, measure
from pipeline.stages.calibrate.model import all_experts, load, separate
from pipeline.stages.calibrate.third_party import Notes, quietly
from pipeline.stages.dataset.freezing import read_samples
from pipeline.stages.evaluate.comparison import evaluate
from pipeline.stages.evaluate.results import Export, read_metrics
from tests.support.calibrated import Calibrations, facts

pytestmark = pytest.mark.models

SPREAD = [Parallelism(1), Parallelism(2), Parallelism(2, 2), Parallelism(4, expert=2)]


def exported(calibrations: Calibrations, family: str) -> Path:
    """FP8 weights and cache; Mixtral for several sizes."""
    sizes = SPREAD if family == "mixtral" else SPREAD[:2]
    return calibrations.calibrated("fp8", "fp8", family, exports=tuple(sizes))


def reference(source: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with quietly("loading", Notes()):
        return auto.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()


@pytest.mark.parametrize("family", ["mixtral", "phi3"])
def test_fp8_stays_near_the_original(calibrations: Calibrations, tmp_path: Path, family: str) -> None:
    folder = exported(calibrations, family)
    exports = [Export(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    evaluate(
        calibrations.source(family), exports, calibrations.dataset() / "heldout.jsonl", into=tmp_path,
        progress=Silent(), device="cpu",
    )  # fmt: skip
    unified, *ranks = read_metrics(tmp_path)
    assert (unified.files, unified.format) == ("hf", "fp8")
    assert 0 < unified.mean_kl.value < 0.1  # random routers are easily turned
    assert len(ranks) == (4 if family == "mixtral" else 2)
    # Weights are the same, and so are the ranks however they are divided; the cache has the scale of engines.
    assert len({rank.mean_kl for rank in ranks}) == 1
    assert ranks[0].mean_kl.value == pytest.approx(unified.mean_kl.value, rel=0.5)
    assert facts(folder)["warnings"] == []


def calibrated_model(calibrations: Calibrations, family: str) -> Any:
    """ModelOpt's fake-quantized model, calibrated as the exports were."""
    source = calibrations.source(family)
    architecture = Architecture.read(source)
    samples = read_samples(calibrations.dataset() / "calibration.jsonl", architecture.vocab)
    with quietly("ModelOpt", Notes()):
        import modelopt.torch.export  # noqa: F401

        model = load(source, architecture, "cpu")
        batches = make_batches(samples, 8 * 48)
        measure(model, Format.FP8, awq_block_size=64, kv_cache="fp8", batches=batches, progress=Silent())
    return model


@pytest.mark.parametrize("tensor", [1, 2])
def test_experts_are_as_modelopt_exports_them_where_it_does(
    calibrations: Calibrations, tmp_path: Path, tensor: int
) -> None:
    folder, model = exported(calibrations, "mixtral"), calibrated_model(calibrations, "mixtral")
    architecture = Architecture.read(calibrations.source("mixtral"))
    with quietly("ModelOpt", Notes()):
        modelopt_export.export(model, architecture, Parallelism(tensor), tmp_path)
    for rank in range(tensor):
        file = f"rank{rank}.safetensors"
        ours, theirs = (TensorFiles(path, file) for path in (folder / f"trtllm-tp{tensor}", tmp_path))
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype, name
            np.testing.assert_array_equal(ours[name].view(np.uint8), value.view(np.uint8), err_msg=name)


def test_groups_of_experts_hold_what_the_whole_holds(calibrations: Calibrations) -> None:
    folder = exported(calibrations, "mixtral")
    whole = TensorFiles(folder / "trtllm-tp1")
    config = json.loads((folder / "trtllm-tp4-ep2/config.json").read_text())
    assert (config["mapping"]["moe_tp_size"], config["mapping"]["moe_ep_size"]) == (2, 2)
    assert config["quantization"]["exclude_modules"] == ["lm_head", "*router"]
    name, inner = "transformer.layers.1.mlp.", 128  # of 256, for two ranks each
    for number in range(4):
        rank = TensorFiles(folder / "trtllm-tp4-ep2", f"rank{number}.safetensors")
        mine = slice(2 * (number % 2), 2 * (number % 2) + 2)
        columns = slice(number // 2 * inner, (number // 2 + 1) * inner)
        up, gate = np.split(whole[name + "fc.weight"][mine].view(np.uint8), 2, axis=1)
        expected = np.concatenate([up[:, columns], gate[:, columns]], axis=1)
        np.testing.assert_array_equal(rank[name + "fc.weight"].view(np.uint8), expected)
        down = whole[name + "proj.weight"][mine, :, columns].view(np.uint8)
        np.testing.assert_array_equal(rank[name + "proj.weight"].view(np.uint8), down)
        for layer in ("fc", "proj"):
            scales = f"{name}{layer}.weights_scaling_factor"
            np.testing.assert_array_equal(rank[scales], whole[scales][mine])
            inputs = f"{name}{layer}.activation_scaling_factor"
            np.testing.assert_array_equal(rank[inputs], whole[inputs])


def test_phi_3s_ranks_are_its_fused_layers(calibrations: Calibrations) -> None:
    folder = exported(calibrations, "phi3")
    source, ranks = (
        CheckpointReader(folder / "hf"),
        [TensorFiles(folder / "trtllm-tp2", f"rank{number}.safetensors") for number in range(2)],
    )
    gate, up = np.split(source.tensors["model.layers.1.mlp.gate_up_proj.weight"].view(np.uint8), 2)
    halves = [np.split(rank["transformer.layers.1.mlp.fc.weight"].view(np.uint8), 2) for rank in ranks]
    np.testing.assert_array_equal(np.concatenate([half[0] for half in halves]), up)
    np.testing.assert_array_equal(np.concatenate([half[1] for half in halves]), gate)
    for rank in ranks:
        for ours, theirs in (("weights", "weight_scale"), ("activation", "input_scale")):
            scale = rank[f"transformer.layers.1.attention.qkv.{ours}_scaling_factor"]
            assert scale == source.tensors[f"model.layers.1.self_attn.qkv_proj.{theirs}"]


def test_separate_experts_compute_what_fused_ones_do_and_see_every_token(calibrations: Calibrations) -> None:
    model, tokens = reference(calibrations.source("mixtral")), torch.arange(3, 60)[None]
    seen: dict[int, int] = {}
    with torch.inference_mode():
        fused = model(tokens).logits
        separate(model)
        apart = model(tokens).logits
        for number, expert in enumerate(model.model.layers[0].block_sparse_moe.experts):
            expert.register_forward_hook(
                lambda _, given, __, number=number: seen.update({number: len(given[0])})
            )
        with all_experts(model):
            everywhere = model(tokens).logits
    assert seen == dict.fromkeys(range(4), 57)
    for other in (apart, everywhere):
        assert (other - fused).abs().max() < 1e-5 * fused.abs().max()
    assert not any("mlp" in name for name in model.state_dict())


@pytest.mark.parametrize("family", ["mixtral", "phi3"])
def test_unquantized_they_are_divided_from_the_source(calibrations: Calibrations, family: str) -> None:
    folder = calibrations.calibrated("none", "auto", family)
    whole, source = TensorFiles(folder / "trtllm-tp1"), TensorFiles(calibrations.source(family))
    np.testing.assert_array_equal(
        whole["transformer.layers.1.attention.dense.weight"], source["model.layers.1.self_attn.o_proj.weight"]
    )
