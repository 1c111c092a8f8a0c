"""MXFP4 weights cast to NVFP4: the same numbers, but for blocks that are too small to be told beside the largest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.errors import UserError
from pipeline.models import CheckpointReader, Format, TensorFiles
from pipeline.progress import Silent
from pipeline.runtimes.cpu.ir import build_ir
from pipeline.stages.calibrate.calibration import calibrate
from pipeline.stages.calibrate.measurement import modelopt_config
from pipeline.stages.calibrate.third_party import Notes, quietly
from pipeline.stages.evaluate.decoder import Decoder
from tests.support.calibrated import quantization
from tests.support.compressed import compressed_checkpoint
from tests.support.decoding import Stateful
from tests.support.models import as_mxfp4, make_checkpoint

pytestmark = pytest.mark.models

TEXT = [[5, 9, 200, 31, 7, 77]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    plain = make_checkpoint(tmp_path / "plain", layers=1, hidden=64, heads=2, kv_heads=1, intermediate=128)
    return compressed_checkpoint(plain, tmp_path / "source", "mxfp4a16")


def cast(source: Path, into: Path, form: str = "w4a16_nvfp4") -> dict[str, object]:
    into.mkdir()
    (into / "calibration.jsonl").write_text(f'{{"tokens": {TEXT[0]}}}\n{{"tokens": {TEXT[0][::-1]}}}\n')
    return calibrate(source, into, quantization(form), exports=(), into=into, progress=Silent(), device="cpu")


def plain_gpt_oss(folder: Path, **changes: Any) -> Path:
    """A small gpt-oss that is not quantized."""
    sizes: dict[str, Any] = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 96}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return make_checkpoint(folder, "gpt_oss", **sizes, attention_bias=True, rope_scaling=yarn, **changes)


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    return as_mxfp4(plain_gpt_oss(tmp_path / "plain", layers=2, sliding_window=4), tmp_path / "source")


@pytest.mark.parametrize("form", ["w4a16_nvfp4", "nvfp4"])
def test_experts_of_gpt_oss_are_the_same_to_the_last_bit(gpt_oss: Path, tmp_path: Path, form: str) -> None:
    """In the layout that ModelOpt 0.47 exports for it; what is not in MXFP4 stays as it is."""
    facts = cast(gpt_oss, tmp_path / "into", form)
    before, after = CheckpointReader(gpt_oss), CheckpointReader(tmp_path / "into/hf")
    experts = list(before.architecture.stacked_experts())
    blocks = sum(4 * shape.rows * shape.columns // 32 for shape in experts)
    assert facts["cast"] == {"blocks": blocks, "inexact_blocks": 0, "inexact_layers": []}
    assert (after.faults(), str(after.quantization.format)) == ([], form)
    uncast, cast_ = (Decoder(model, TEXT, "cpu", observe=True) for model in (before, after))
    hidden, rounded = (model.hidden_states(lambda: None).numpy() for model in (uncast, cast_))
    for shape in experts:
        for index in range(4):
            first, second = (model.expert(shape.name, index) for model in (before, after))
            np.testing.assert_array_equal(first.dequantize(), second.dequantize())
            np.testing.assert_array_equal(first.bias, second.bias)
        if form == "nvfp4":
            assert second.input_scale is not None
            assert second.input_scale * np.float32(448 * 6) >= np.float32(uncast.largest_inputs[shape.name])
    for name in {name for name in before.tensors if ".experts." not in name}:
        assert before.tensors[name].tobytes() == after.tensors[name].tobytes()
    if form == "w4a16_nvfp4":
        np.testing.assert_array_equal(hidden, rounded)
    assert 0 < np.abs(hidden - rounded).mean() < 0.3 * hidden.std() or form == "w4a16_nvfp4"
    logits = []
    for model, place in ((gpt_oss, "before"), (tmp_path / "into/hf", "after")):
        build_ir(model, tmp_path / place, progress=Silent())
        logits.append(Stateful(tmp_path / place).logits(TEXT[0]))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-6 * np.abs(logits[0]).max())


def test_the_layout_of_experts_is_modelopt_s(tmp_path: Path) -> None:
    """ModelOpt's export of a gpt-oss in BF16 is read without a fault, as the weights that it rounds."""
    import torch
    from transformers import AutoModelForCausalLM

    plain = plain_gpt_oss(tmp_path / "plain", layers=1, dtype="float32")
    with quietly("ModelOpt", Notes()), torch.no_grad():
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.quantization import quantize

        model: Any = AutoModelForCausalLM.from_pretrained(plain).eval()
        quantize(model, modelopt_config(Format.NVFP4, 64, "auto"), lambda model: model(torch.tensor(TEXT)))
        experts = model.model.layers[0].mlp.experts
        wanted = {
            name: getattr(experts, f"{name}_weight_quantizer")(getattr(experts, name).transpose(1, 2)).numpy()
            for name in ("gate_up_proj", "down_proj")
        }
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=tmp_path / "exported")
    exported = CheckpointReader(tmp_path / "exported")
    exported.check()
    for shape in exported.architecture.stacked_experts():
        got = np.stack([exported.expert(shape.name, index).dequantize() for index in range(4)])
        np.testing.assert_allclose(got, wanted[shape.name.rsplit(".")[-1]], atol=1e-7)


def test_the_model_is_the_same_to_the_last_bit(source: Path, tmp_path: Path) -> None:
    facts = cast(source, tmp_path / "into")
    before, after = CheckpointReader(source), CheckpointReader(tmp_path / "into/hf")
    weights = sum(shape.rows * shape.columns for shape in before.architecture.linears())
    assert facts["cast"] == {"blocks": weights // 32, "inexact_blocks": 0, "inexact_layers": []}
    assert (after.faults(), after.quantization.format) == ([], Format.W4A16_NVFP4)
    for shape in before.architecture.linears():
        np.testing.assert_array_equal(
            after.linear(shape.name).dequantize(), before.linear(shape.name).dequantize()
        )
    first, second = (
        Decoder(model, TEXT, "cpu").hidden_states(lambda: None).numpy() for model in (before, after)
    )
    np.testing.assert_array_equal(first, second)
    scales = {after.linear(f"model.layers.0.self_attn.{part}_proj").weight_scale_2.item() for part in "qkv"}  # type: ignore[union-attr]
    assert len(scales) == 1


def test_blocks_far_below_the_largest_are_rounded_and_counted(source: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    tensors = {key: np.array(value) for key, value in TensorFiles(source).items()}
    tensors[f"{name}.weight_scale"][0, 0] = 130
    tensors[f"{name}.weight_scale"][1, :4] = (130 - 17, 130 - 18, 130 - 30, 0)
    tensors[f"{name}.weight_packed"][1, 48:64] = 0x80  # a block of zeros is exact, whatever its scale
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    said = cast(source, tmp_path / "into")["cast"]
    assert (said["inexact_blocks"], said["inexact_layers"]) == (2, [name])  # type: ignore[index]
    before, after = (
        CheckpointReader(checkpoint_dir).linear(name).dequantize()
        for checkpoint_dir in (source, tmp_path / "into/hf")
    )
    np.testing.assert_array_equal(after[2:], before[2:])
    np.testing.assert_array_equal(after[1, :32], before[1, :32])
    assert (
        np.abs(after - before).max() <= 2.0 ** (3 - 17) / 4
    )  # half a step of the smallest scale that can be told


def test_other_formats_are_not_quantized_twice(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is quantized already"):
        calibrate(
            source, tmp_path, quantization("fp8"), exports=(), into=tmp_path, progress=Silent(), device="cpu"
        )
