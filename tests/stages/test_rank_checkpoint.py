"""TensorRT-LLM checkpoints read as a whole: by the layout that writes them, and by arithmetic that knows neither."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from pipeline.contracts.checkpoint import CheckpointLayout, check_files
from pipeline.errors import CheckpointError
from pipeline.models import Architecture, CheckpointQuantization, Format, TensorFiles
from pipeline.plan.parallelism import Parallelism
from pipeline.runtimes.tensorrt.checkpoint import RankCheckpoint
from pipeline.runtimes.tensorrt.checkpoint.layout import Rank, parts
from pipeline.stages.evaluate.decoder import Decoder
from tests.support import raw_ranks
from tests.support.calibrated import Calibrations

pytestmark = pytest.mark.models

FORMATS = ("fp8", "int4_awq", "w4a8_awq", "int8_sq")
LAYERS = {
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.dense": ["self_attn.o_proj"],
    "mlp.fc": ["mlp.gate_proj"],
    "mlp.gate": ["mlp.up_proj"],
    "mlp.proj": ["mlp.down_proj"],
}


ENGINE_FORMATS = (
    Format.NONE, Format.FP8, Format.INT4_AWQ, Format.W4A8_AWQ, Format.INT8_SQ, Format.NVFP4,
)  # fmt: skip
CASES = [
    *(("LlamaForCausalLM", form, Parallelism(4, 2)) for form in ENGINE_FORMATS),
    ("LlamaForCausalLM", "int4_awq", Parallelism()), ("Qwen2ForCausalLM", "w4a8_awq", Parallelism(2)),
    ("MixtralForCausalLM", "none", Parallelism(4, 2)), ("MixtralForCausalLM", "fp8", Parallelism(2, expert=2)),
    ("Phi3ForCausalLM", "none", Parallelism()), ("Phi3ForCausalLM", "fp8", Parallelism(2)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "form", "sizes"), CASES, ids=str)
def test_the_layout_names_what_the_contract_does(family: str, form: str, sizes: Parallelism) -> None:
    config: dict[str, Any] = {
        "architectures": [family], "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512, "vocab_size": 501,
        "max_position_embeddings": 64, "dtype": "bfloat16",
    }  # fmt: skip
    if family == "MixtralForCausalLM":
        config["num_local_experts"] = 4
    model, form = Architecture.from_config(config), Format(form)
    grouped = form in (Format.INT4_AWQ, Format.W4A8_AWQ, Format.NVFP4)
    quantization = CheckpointQuantization(
        form, (16 if form is Format.NVFP4 else 64) if grouped else None, "FP8"
    )
    layout = CheckpointLayout(
        model, "BF16", form, quantization.group_size, "fp8", sizes.tensor, sizes.pipeline, sizes.expert
    )
    for number in range(sizes.world):
        found = {part.name: part for part in parts(model, Rank(number, sizes), quantization)}
        wanted = layout.tensors(number)
        assert {name: part.shape for name, part in found.items()} == {
            name: expected.shape for name, expected in wanted.items()
        }
        for name, expected in wanted.items():
            assert (found[name].dtype or "BF16") in expected.dtypes, name


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_evaluated_is_what_the_bytes_of_all_ranks_say(calibrations: Calibrations, form: str) -> None:
    folder = calibrations.calibrated(form) / "trtllm-tp2"
    model = Architecture.read(calibrations.source())
    checkpoint = RankCheckpoint(folder, model)
    checkpoint.check()
    ranks: list[Any] = [raw_ranks.read(folder / f"rank{number}.safetensors") for number in range(2)]
    decoder = Decoder(checkpoint, [[1, 2, 3]], "cpu")
    random = np.random.default_rng(7)
    for layer in range(model.layers):
        for name, sources in LAYERS.items():
            divided_inputs = name in ("attention.dense", "mlp.proj")
            theirs = f"transformer.layers.{layer}.{name}"
            inputs = sum(checkpoint.linear(f"model.layers.{layer}.{sources[0]}").shape[1:])
            x = random.standard_normal((5, inputs)).astype(np.float32)
            columns = np.split(x, 2, axis=1) if divided_inputs else [x, x]
            by_rank = [
                raw_ranks.multiplied(rank, theirs, form, 64, part.astype(np.float64))
                for rank, part in zip(ranks, columns, strict=True)
            ]
            wanted = sum(by_rank) if divided_inputs else _outputs(by_rank, name)
            got = [
                decoder.linear(f"model.layers.{layer}.{source}", torch.from_numpy(x)) for source in sources
            ]
            together = torch.cat(got, dim=1).numpy()
            # In float32 an input or a weight may fall to the other side of a tie.
            assert np.abs(together - wanted).mean() < 1e-3 * wanted.std(), theirs
            assert np.median(np.abs(together - wanted)) < 1e-5 * wanted.std(), theirs
    np.testing.assert_array_equal(
        checkpoint.array("model.layers.1.post_attention_layernorm.weight"),
        ranks[0]["transformer.layers.1.post_layernorm.weight"],
    )
    table = np.concatenate([rank["transformer.vocab_embedding.weight"] for rank in ranks])
    np.testing.assert_array_equal(checkpoint.array(model.embedding), table[: model.vocab])


def _outputs(by_rank: list[Any], name: str) -> Any:
    """Outputs of two ranks in the order of the whole: of qkv, each has its share of q, then of k, then of v."""
    if name != "attention.qkv":
        return np.concatenate(by_rank, axis=1)
    shares = [np.split(part, [64, 96], axis=1) for part in by_rank]
    return np.concatenate([share[kind] for kind in range(3) for share in shares], axis=1)


def test_a_cache_has_the_one_scale_that_engines_read(calibrations: Calibrations) -> None:
    folder = calibrations.calibrated("fp8", kv_cache="fp8") / "trtllm-tp2"
    checkpoint = RankCheckpoint(folder, Architecture.read(calibrations.source()))
    stored = raw_ranks.read(folder / "rank0.safetensors")[
        "transformer.layers.1.attention.kv_cache_scaling_factor"
    ]
    assert checkpoint.kv_scales(1) == (stored.item(), stored.item())
    assert stored.item() >= 1


def test_ranks_that_disagree_are_refused(calibrations: Calibrations, tmp_path: Path) -> None:
    folder = tmp_path / "trtllm-tp2"
    shutil.copytree(calibrations.calibrated("fp8") / "trtllm-tp2", folder)
    tensors = {name: np.array(value) for name, value in TensorFiles(folder, "rank1.safetensors").items()}
    tensors["transformer.layers.1.mlp.fc.weights_scaling_factor"] *= 2
    save_file(tensors, folder / "rank1.safetensors")
    checkpoint = RankCheckpoint(folder, Architecture.read(calibrations.source()))
    checkpoint.check()
    with pytest.raises(
        CheckpointError, match=r"rank1\.safetensors holds another .*mlp\.fc\.weights_scaling_factor"
    ):
        checkpoint.linear("model.layers.1.mlp.gate_proj")


def test_what_trtllm_build_would_not_read_is_refused(calibrations: Calibrations, tmp_path: Path) -> None:
    folder = tmp_path / "trtllm-tp2"
    shutil.copytree(calibrations.calibrated("fp8") / "trtllm-tp2", folder)
    (folder / "rank1.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rotary_base": 1.0}))
    with pytest.raises(CheckpointError) as refused:
        RankCheckpoint(folder, Architecture.read(calibrations.source())).check()
    assert "rank1.safetensors is missing" in str(refused.value)
    assert "rotary_base is 1.0" in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "rank1.safetensors").unlink(), "rank1.safetensors is missing"),
        (lambda folder: (folder / "quant_cfg.json").write_text("{}"), "quant_cfg.json is not expected"),
        (lambda folder: _edit(folder, rotary_base=10000.0), "rotary_base is 10000.0, not 500000.0"),
        (
            lambda folder: _edit(folder, mapping={"world_size": 1, "tp_size": 1}),
            "mapping.tp_size is 1, not 2",
        ),
        (
            lambda folder: _tensors(folder, drop="qkv.weights_scaling_factor"),
            "qkv.weights_scaling_factor is missing",
        ),
        (lambda folder: _tensors(folder, zero="fc.activation_scaling_factor"), "not positive"),
        (lambda folder: _tensors(folder, halve="dense.weight"), "has shape"),
    ],
)
def test_damaged_ranks_are_found(
    calibrations: Calibrations, tmp_path: Path, damage: Any, message: str
) -> None:
    source = calibrations.calibrated("fp8")
    folder = tmp_path / "trtllm"
    shutil.copytree(source / "trtllm-tp2", folder)
    layout = CheckpointLayout(Architecture.read(source / "hf"), "BF16", Format.FP8, tensor=2)
    check_files(folder, layout)
    damage(folder)
    with pytest.raises(CheckpointError, match=message.replace(".", r"\.")):
        check_files(folder, layout)


def _edit(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | changes)
    )


def _tensors(folder: Path, drop: str = "\0", zero: str = "\0", halve: str = "\0") -> None:
    kept: dict[str, np.ndarray] = {}
    for name, stored in TensorFiles(folder, pattern="rank1.safetensors").items():
        value = np.array(stored)
        if name.endswith(drop):
            continue
        value = np.zeros_like(value) if name.endswith(zero) else value
        kept[name] = np.array(value[: len(value) // 2]) if name.endswith(halve) else value
    save_file(kept, folder / "rank1.safetensors")
