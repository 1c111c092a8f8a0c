"""What `build_ir` writes, reads and refuses: the same bytes each time, weights packed, no tensor left out."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import openvino as ov
import pytest
from safetensors.numpy import save_file

from pipeline.errors import CheckpointError, InvalidInput, UserError
from pipeline.models import CheckpointReader, Format, TensorFiles
from pipeline.progress import Silent
from pipeline.runtimes.cpu.engine.trimming import trim_outputs
from pipeline.runtimes.cpu.ir import build_ir
from pipeline.runtimes.cpu.ir.weights import Weights
from tests.support.decoding import Paged, Stateful, prompt, reference, reference_logits
from tests.support.models import make_checkpoint, quantize_checkpoint

pytestmark = pytest.mark.models

FORMATS = ("fp8", "int4_awq", "w4a8_awq", "int8_sq")
PACKED = {"fp8": "bf16", "int4_awq": "i4", "w4a8_awq": "i4", "int8_sq": "i8"}  # e4m3 is exact in bf16
BITS = {"bf16": 16, "i8": 8, "i4": 4}
FILES = ("openvino_model.xml", "openvino_model.bin", "engine.json")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module", params=FORMATS)
def quantized(request: pytest.FixtureRequest, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_checkpoint(plain, tmp_path_factory.mktemp("quantized"), request.param, kv_cache=True)


def _build(checkpoint: Path, into: Path, **options: Any) -> dict[str, Any]:
    return build_ir(checkpoint, into, progress=Silent(), **options)


class Built(NamedTuple):
    checkpoint: Path
    plain: Path  # weights alone are quantized
    rounded: Path  # inputs, keys and values are rounded, too
    facts: dict[str, Any]  # of `plain`


@pytest.fixture(scope="module")
def built(quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both models of a quantized checkpoint."""
    folder = tmp_path_factory.mktemp("built")
    facts = _build(quantized, folder / "plain")
    _build(quantized, folder / "rounded", simulate_activations=True)
    return Built(quantized, folder / "plain", folder / "rounded", facts)


def test_the_same_checkpoint_gives_the_same_bytes(built: Built, tmp_path: Path) -> None:
    _build(built.checkpoint, tmp_path, simulate_activations=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (built.rounded / name).read_bytes(), name


def test_weights_stay_packed_in_the_file_and_engine_json_holds_the_facts(built: Built) -> None:
    facts, arch = built.facts, CheckpointReader(built.checkpoint).architecture
    form = facts["quantization"]["format"]
    kind = PACKED[form]
    # Inputs of these int8_sq layers are scaled differently, so that they are not joined.
    single = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    products = {"qkv_proj": single[:3], "gate_up_proj": single[3:]}
    if form == "int8_sq":
        products = {name: (name,) for name in single}
    products |= {"o_proj": ("o_proj",), "down_proj": ("down_proj",)}
    assert products.keys() == {name for name in facts["weights"] if name.endswith("_proj")}
    for name, ends in products.items():
        shapes = [shape for shape in arch.linears() if shape.name.endswith(ends)]
        sizes = [shape.rows * shape.columns for shape in shapes]
        # Eight outputs besides, for one packing.
        sizes += [8 * shape.columns for shape in shapes if shape.name.endswith(ends[0])]
        assert facts["weights"][name] == {"precision": kind, "bytes": sum(sizes) * BITS[kind] // 8}
    assert facts["weights"]["embed_tokens"]["precision"] == "bf16"
    assert sum(entry["bytes"] for entry in facts["weights"].values()) < facts["bytes"]["openvino_model.bin"]
    assert json.loads((built.plain / "engine.json").read_text()) == facts
    expected = {"architecture": "LlamaForCausalLM", "layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2}
    expected |= {"head_dim": 64, "vocab_size": 512, "max_position_embeddings": 2048, "sliding_window": None}
    expected |= {"tied": False, "bf16_pays": False, "simulate_activations": False}
    assert {key: facts[key] for key in expected} == expected
    assert facts["quantization"]["kv_cache"] == "FP8"
    assert facts["quantization"]["producer"] == "modelopt 0.47.0"


@pytest.mark.parametrize("biased", [False, True])
def test_padding_is_cut_off_where_products_are_in_bf16(built: Built, tmp_path: Path, biased: bool) -> None:
    """Without a copy of the weights, and to the same logits."""
    folder = built.plain
    if biased:
        _build(make_checkpoint(tmp_path / "biased", "qwen2"), folder := tmp_path / "ir")
    facts = json.loads((folder / "engine.json").read_text())
    exact, tokens = Stateful(folder).logits(prompt(24)), prompt(24)
    model = ov.Core().read_model(folder / "openvino_model.xml")
    products = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    longer = [node.get_output_partial_shape(0)[-1].get_length() for node in products]
    kept = trim_outputs(model, facts["padded"])
    shorter = [node.get_output_partial_shape(0)[-1].get_length() for node in products]
    changed = [(first, second) for first, second in zip(longer, shorter, strict=True) if first != second]
    assert len(changed) >= 8
    assert all(first == second + 8 for first, second in changed)
    assert len(kept) >= len(changed)
    trimmed = Stateful(folder, model=model).logits(tokens)
    assert np.abs(trimmed - exact).max() < 1e-5 * np.abs(exact).max()


def test_rounding_is_felt_and_survives_paging(built: Built) -> None:
    plain, stateful, paged = Stateful(built.plain), Stateful(built.rounded), Paged(built.rounded)
    tokens = prompt(16)
    assert np.abs(plain.logits(tokens) - stateful.logits(tokens)).max() > 0.01
    errors = []
    for seed in range(8):
        tokens = prompt(8, seed=seed)
        errors.append(np.abs(paged.logits(tokens, [5, 3]) - stateful.logits(tokens)).max())
    assert np.median(errors) < 1e-3  # a number at the edge of a step may fall to its other side


@pytest.mark.parametrize("form", ["int4_awq", "int8_sq"])
def test_packed_weights_are_multiplied_packed(plain: Path, tmp_path: Path, form: str) -> None:
    """After compilation, too: OpenVINO neither widens them nor rounds the inputs by scales of its own."""
    _build(quantize_checkpoint(plain, tmp_path / "checkpoint", form), tmp_path / "ir")
    used: Counter[str] = Counter()
    for node in Stateful(tmp_path / "ir").compiled.get_runtime_model().get_ops():
        if node.get_rt_info()["layerType"].astype(str) == "FullyConnected":
            weight = node.input_value(1).get_node()
            used[str(weight.get_element_type().get_type_name())] += 1
            assert node.input_value(0).get_element_type().get_type_name() == "f32"
    # Four a layer, or seven with inputs of their own, and the output projection as stored and in 8 bits.
    assert used == Counter({PACKED[form]: 14 if form == "int8_sq" else 8}) + Counter({"bf16": 1, "i8": 1})


def test_rounded_int8_layers_are_integer_products(plain: Path, tmp_path: Path) -> None:
    checkpoint = quantize_checkpoint(plain, tmp_path / "checkpoint", "int8_sq")
    _build(checkpoint, tmp_path / "ir", simulate_activations=True)
    nodes = [node.get_rt_info() for node in Stateful(tmp_path / "ir").compiled.get_runtime_model().get_ops()]
    products = Counter(
        info["runtimePrecision"].astype(str)
        for info in nodes
        if info["layerType"].astype(str) == "FullyConnected"
    )
    assert products == {"i8": 14, "bf16": 1}


@pytest.mark.parametrize(
    ("form", "head"), [("fp8", True), ("int4_awq", False), ("w4a8_awq", False), ("int8_sq", True)]
)
def test_quantized_layers_and_head_equal_the_weights_that_they_stand_for(
    plain: Path, tmp_path: Path, form: str, head: bool
) -> None:
    folder = quantize_checkpoint(plain, tmp_path / "checkpoint", form, head=head)
    _build(folder, tmp_path / "ir")
    model, checkpoint = reference(plain), CheckpointReader(folder)
    _set_weights(model, checkpoint, head)
    tokens = prompt(40)
    expected = reference_logits(model, tokens)
    for logits in (Stateful(tmp_path / "ir").logits(tokens), Paged(tmp_path / "ir").logits(tokens, [33, 7])):
        assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def _set_weights(model: Any, checkpoint: CheckpointReader, head: bool) -> None:
    import torch

    names = [shape.name for shape in checkpoint.architecture.linears()] + ["lm_head"] * head
    with torch.no_grad():
        for name in names:
            layer = checkpoint.linear(name)
            assert layer.weight_scale is not None
            rows, columns = layer.shape
            groups = layer.scales().shape[1]
            # Without the second step of w4a8_awq, which `simulate_activations` adds.
            codes = layer.codes().astype(np.float32).reshape(rows, groups, columns // groups)
            weight = (codes * layer.scales()[:, :, None]).reshape(rows, columns)
            if layer.pre_quant_scale is not None:
                weight = weight * layer.pre_quant_scale.astype(np.float32)
            model.get_submodule(name).weight.copy_(torch.from_numpy(weight))


def test_bf16_is_kept_and_float32_is_too(tmp_path: Path) -> None:
    for dtype, kind, size in (("bfloat16", "bf16", 2), ("float16", "f16", 2), ("float32", "f32", 4)):
        checkpoint = make_checkpoint(tmp_path / dtype, dtype=dtype, tied=True)
        facts = _build(checkpoint, tmp_path / f"{dtype}-ir")
        assert facts["weights"]["embed_tokens"] == {"precision": kind, "bytes": 512 * 256 * size}
        assert "lm_head" not in facts["weights"]  # tied: stored once


def _edit(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = {name: np.array(values) for name, values in TensorFiles(folder).items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_everything_wrong_with_the_tensors_is_said_at_once(plain: Path, tmp_path: Path) -> None:
    folder = quantize_checkpoint(plain, tmp_path / "checkpoint", "fp8", kv_cache=True)

    def damage(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        del tensors["model.layers.0.mlp.up_proj.weight_scale"]
        del tensors["model.layers.1.self_attn.v_proj.v_scale"]
        tensors["model.layers.1.mlp.down_proj.pre_quant_scale"] = np.ones(512, np.float32)
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((8, 8), ml_dtypes.float8_e4m3fn)
        tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)

    _edit(folder, damage)
    with pytest.raises(CheckpointError) as caught:
        _build(folder, tmp_path / "ir")
    message = str(caught.value)
    for name in (
        "model.norm.weight is missing",
        "model.layers.0.mlp.up_proj.weight_scale is missing",
        "model.layers.1.self_attn.v_proj.v_scale is missing",
        "model.layers.1.mlp.down_proj.pre_quant_scale is not expected",
        "model.layers.0.self_attn.q_proj.weight has shape [8, 8]",
        "model.layers.7.mlp.up_proj.weight is not expected",
    ):
        assert name in message
    assert not (tmp_path / "ir").exists()


def test_tensors_that_nothing_asks_for_are_known(quantized: Path) -> None:
    weights = Weights(CheckpointReader(quantized), simulate=False)
    assert weights.unread() == sorted(CheckpointReader(quantized).tensors)
    weights.vector("model.norm.weight")
    assert "model.norm.weight" not in weights.unread()


def _configure(folder: Path, file: str, **settings: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_models_that_cannot_be_built_are_refused_by_name(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "checkpoint")
    _configure(tmp_path / "checkpoint", "config.json", hidden_act="gelu")
    with pytest.raises(InvalidInput, match="gelu"):
        _build(tmp_path / "checkpoint", tmp_path / "ir")


def test_a_cache_of_another_kind_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = quantize_checkpoint(plain, tmp_path / "checkpoint", "fp8", kv_cache=True)
    settings = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    _configure(folder, "hf_quant_config.json", quantization={**settings, "kv_cache_quant_algo": "NVFP4"})
    with pytest.raises(UserError, match="NVFP4"):
        _build(folder, tmp_path / "ir")


def test_inputs_that_cannot_be_simulated_are_refused(plain: Path) -> None:
    checkpoint = CheckpointReader(plain)
    checkpoint.quantization = replace(checkpoint.quantization, format=Format.NVFP4)
    Weights(checkpoint, simulate=False)
    with pytest.raises(UserError, match="inputs of nvfp4 layers are not simulated"):
        Weights(checkpoint, simulate=True)
