"""The rank files: those of ModelOpt, byte for byte, where it makes them; joined, they are the source again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from pipeline.contracts.checkpoint import CheckpointLayout, faults_of, needed_keys
from pipeline.errors import InvalidInput, StageError, UserError
from pipeline.models import Architecture, TensorFiles
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Silent
from pipeline.runtimes.tensorrt.checkpoint import (
    MODEL_TYPES,
    RankCheckpoint,
    convert,
    modelopt_export,
    splitting,
)
from pipeline.stages.calibrate.model import load
from pipeline.stages.calibrate.third_party import Notes, quietly
from tests.support.models import make_checkpoint

pytestmark = pytest.mark.models

Arrays = dict[str, np.ndarray[Any, Any]]
# Keys of config.json that are the maker's business, or a trap of ModelOpt's (the last rank's number).
_OWN = {"producer", "logits_dtype", "rank", "decoder", "rmsnorm", "lm_head_bias"}


def ranks_of(folder: Path) -> list[TensorFiles]:
    count = json.loads((folder / "config.json").read_text())["mapping"]["world_size"]
    return [TensorFiles(folder, f"rank{number}.safetensors") for number in range(count)]


@pytest.mark.parametrize(
    ("family", "sizes", "changes"),
    [
        ("llama", Parallelism(2), {"tied": True}),
        ("llama", Parallelism(4), {"kv_heads": 2}),  # a head for two ranks
        ("llama", Parallelism(2, 2), {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("qwen2", Parallelism(1), {"dtype": "float32"}),
        ("qwen3", Parallelism(2), {"head_dim": 32}),
    ],
)
def test_it_is_modelopts_export(
    tmp_path: Path, family: Any, sizes: Parallelism, changes: dict[str, Any]
) -> None:
    source = make_checkpoint(tmp_path / "source", family, vocab=512, **changes)
    architecture = Architecture.read(source)
    convert(source, sizes, into=tmp_path / "ours", progress=Silent())
    with quietly("ModelOpt", Notes()):
        from modelopt.torch.export import export_tensorrt_llm_checkpoint

        model = load(source, architecture, "cpu")
        export_tensorrt_llm_checkpoint(
            model,
            MODEL_TYPES[architecture.family],
            modelopt_export.torch_dtype(architecture),
            export_dir=tmp_path / "theirs",
            inference_tensor_parallel=sizes.tensor,
            inference_pipeline_parallel=sizes.pipeline,
        )
    ours, theirs = ranks_of(tmp_path / "ours" / sizes.folder), ranks_of(tmp_path / "theirs")
    assert len(ours) == len(theirs) == sizes.world
    for own, other in zip(ours, theirs, strict=True):
        assert set(own) == set(other)
        for name in other:
            assert own[name].dtype == other[name].dtype, name
            np.testing.assert_array_equal(own[name].view(np.uint8), other[name].view(np.uint8), err_msg=name)
    written = json.loads((tmp_path / "ours" / sizes.folder / "config.json").read_text())
    exported = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert {key: written.get(key) for key in exported.keys() - _OWN} == {
        key: value for key, value in exported.items() if key not in _OWN
    }


@pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM"])
def test_what_upstream_reads_without_a_default_is_written_and_asked_for(
    tmp_path: Path, class_name: str
) -> None:
    """QWenConfig has no `seq_length` of its own, for one: trtllm-build would end with an AttributeError."""
    source = tmp_path / "source"
    make_other(source, class_name, experts=4 if class_name == "MixtralForCausalLM" else 0)
    convert(source, Parallelism(), into=tmp_path, progress=Silent())
    model = Architecture.read(source)
    ranks = tmp_path / "trtllm-tp1"
    file = ranks / "config.json"
    written, layout = json.loads(file.read_text()), CheckpointLayout(model, "BF16")
    needed = needed_keys(model.family)
    assert "hidden_size" in needed
    if "qwen" in model.family:
        assert (written["qwen_type"], written["seq_length"]) == (model.family, 8192)
        assert {"qwen_type", "seq_length"} <= needed.keys()
    for key, reader in needed.items():
        file.write_text(json.dumps({name: value for name, value in written.items() if name != key}))
        assert f"config.json: {key} is missing, and {reader} has no default for it" in faults_of(
            ranks, layout
        )


def make_other(
    folder: Path,
    class_name: str,
    *,
    experts: int = 0,
    heads: int = 4,
    kv_heads: int = 2,
    inner: int = 32,
    vocab: int = 70,
) -> Arrays:
    """A random checkpoint of a family that `make_checkpoint` does not make; its tensors."""
    config: dict[str, Any] = {
        "architectures": [class_name], "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 8, "intermediate_size": inner, "vocab_size": vocab,
        "max_position_embeddings": 64, "dtype": "bfloat16", "rope_theta": 1e4,
    }  # fmt: skip
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = Architecture.read(folder)
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {model.embedding: (vocab, 32), "lm_head.weight": (vocab, 32)}
    shapes |= {f"{layer.name}.weight": (layer.rows, layer.columns) for layer in model.linears()}
    shapes |= {f"{layer.name}.bias": (layer.rows,) for layer in model.linears() if layer.bias}
    shapes |= {name: (size,) for name, size in model.vectors()}
    tensors = {
        name: random.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def assert_put_together(folder: Path, sizes: Parallelism, source: Arrays) -> None:
    """All ranks together are the source, tensor by tensor."""
    joined = RankCheckpoint(folder / sizes.folder, Architecture.read(folder / "source"))
    assert set(joined.tensors) == set(source)
    for name, value in source.items():
        np.testing.assert_array_equal(joined.tensors[name], value, err_msg=name)
        assert joined.tensors.headers[name].shape == value.shape


@pytest.mark.parametrize("sizes", [Parallelism(1), Parallelism(4)])
def test_phi_3_has_up_before_gate(tmp_path: Path, sizes: Parallelism) -> None:
    source = make_other(tmp_path / "source", "Phi3ForCausalLM", vocab=72)
    convert(tmp_path / "source", sizes, into=tmp_path, progress=Silent())
    ranks = ranks_of(tmp_path / sizes.folder)[: sizes.tensor]
    gate, up = np.split(source["model.layers.1.mlp.gate_up_proj.weight"], 2)
    halves = [np.split(rank["transformer.layers.1.mlp.fc.weight"], 2) for rank in ranks]
    np.testing.assert_array_equal(np.concatenate([half[0] for half in halves]), up)
    np.testing.assert_array_equal(np.concatenate([half[1] for half in halves]), gate)
    fused = source["model.layers.1.self_attn.qkv_proj.weight"]
    rows = [rank["transformer.layers.1.attention.qkv.weight"] for rank in ranks]
    queries = 32 // sizes.tensor
    np.testing.assert_array_equal(np.concatenate([part[:queries] for part in rows]), fused[:32])
    assert_put_together(tmp_path, sizes, source)
    keys = 8 if sizes.tensor > 1 else 16
    np.testing.assert_array_equal(rows[0][queries : queries + keys], fused[32 : 32 + keys])
    np.testing.assert_array_equal(rows[-1][-keys:], fused[-keys:])
    assert (
        json.loads((tmp_path / sizes.folder / "config.json").read_text())["architecture"] == "Phi3ForCausalLM"
    )


@pytest.mark.parametrize(
    "sizes",
    [
        Parallelism(4),
        Parallelism(4, expert=2),
        Parallelism(2, 2, 2),
    ],
)
def test_mixtrals_experts_lie_where_the_mapping_says(tmp_path: Path, sizes: Parallelism) -> None:
    source = make_other(tmp_path / "source", "MixtralForCausalLM", experts=4)
    convert(tmp_path / "source", sizes, into=tmp_path, progress=Silent())
    ranks = ranks_of(tmp_path / sizes.folder)
    config = json.loads((tmp_path / sizes.folder / "config.json").read_text())
    assert config["moe"] == {"num_experts": 4, "top_k": 2, "normalization_mode": 1}
    assert config["hidden_act"] == "swiglu"
    assert config["mapping"]["moe_tp_size"] * config["mapping"]["moe_ep_size"] == sizes.tensor
    assert_put_together(tmp_path, sizes, source)
    moe = "model.layers.0.block_sparse_moe."
    each, width = 4 // sizes.expert, 32 // (sizes.tensor // sizes.expert)
    for number, rank in enumerate(ranks[: sizes.tensor]):
        fc, proj = rank["transformer.layers.0.mlp.fc.weight"], rank["transformer.layers.0.mlp.proj.weight"]
        assert fc.shape == (each, 2 * width, 32)
        assert proj.shape == (each, 32, width)
        router = rank["transformer.layers.0.mlp.router.weight"]
        assert router.dtype == np.float32
        np.testing.assert_array_equal(router, source[f"{moe}gate.weight"].astype(np.float32))
        begin = number // sizes.expert * width
        for place in range(each):
            expert = f"{moe}experts.{number % sizes.expert * each + place}."
            up, gate, down = (source[f"{expert}{name}.weight"] for name in ("w3", "w1", "w2"))
            np.testing.assert_array_equal(
                fc[place], np.concatenate([up[begin : begin + width], gate[begin : begin + width]])
            )
            np.testing.assert_array_equal(proj[place], down[:, begin : begin + width])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    vocab=st.integers(65, 200),
)
def test_joined_ranks_are_the_source(
    tmp_path_factory: pytest.TempPathFactory, tensor: int, pipeline: int, kv_heads: int, vocab: int
) -> None:
    folder = tmp_path_factory.mktemp("joined")
    source = make_other(folder / "source", "LlamaForCausalLM", heads=8, kv_heads=kv_heads, vocab=vocab)
    sizes = Parallelism(tensor, pipeline)
    convert(folder / "source", sizes, into=folder, progress=Silent())
    ranks = ranks_of(folder / sizes.folder)
    first, last = ranks[:tensor], ranks[-tensor:]
    embedding = np.concatenate([rank["transformer.vocab_embedding.weight"] for rank in first])
    np.testing.assert_array_equal(embedding[:vocab], source["model.embed_tokens.weight"])
    assert not embedding[vocab:].any()
    np.testing.assert_array_equal(
        np.concatenate([rank["lm_head.weight"] for rank in last])[:vocab], source["lm_head.weight"]
    )
    layer, local = "model.layers.3.", f"transformer.layers.{3 if pipeline == 1 else 1}."
    for name, theirs, axis in (
        ("attention.dense", "self_attn.o_proj", 1), ("mlp.fc", "mlp.gate_proj", 0), ("mlp.gate", "mlp.up_proj", 0),
        ("mlp.proj", "mlp.down_proj", 1),
    ):  # fmt: skip
        joined = np.concatenate([rank[f"{local}{name}.weight"] for rank in last], axis=axis)
        np.testing.assert_array_equal(joined, source[f"{layer}{theirs}.weight"])
    qkv = [rank[f"{local}attention.qkv.weight"] for rank in last]
    queries, pairs = 64 // tensor, max(kv_heads // tensor, 1) * 8
    np.testing.assert_array_equal(
        np.concatenate([part[:queries] for part in qkv]), source[f"{layer}self_attn.q_proj.weight"]
    )
    assert_put_together(folder, sizes, source)
    keys = [part[queries : queries + pairs] for part in qkv][:: max(1, tensor // kv_heads)]
    np.testing.assert_array_equal(np.concatenate(keys), source[f"{layer}self_attn.k_proj.weight"])


def test_chunks_do_not_change_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen2")
    convert(source, Parallelism(2), into=tmp_path / "whole", progress=Silent())
    monkeypatch.setattr(splitting, "_CHUNK_BYTES", 1000)
    convert(source, Parallelism(2), into=tmp_path / "chunks", progress=Silent())
    for name in ("rank0.safetensors", "rank1.safetensors"):
        whole, chunks = (tmp_path / kind / "trtllm-tp2" / name for kind in ("whole", "chunks"))
        assert whole.read_bytes() == chunks.read_bytes()


def test_sizes_that_do_not_divide_are_all_told(tmp_path: Path) -> None:
    make_other(tmp_path / "source", "MixtralForCausalLM", experts=4)
    with pytest.raises(InvalidInput) as refused:
        convert(tmp_path / "source", Parallelism(3, 3, 2), into=tmp_path, progress=Silent())
    text = str(refused.value)
    for said in ("4 attention heads", "2 key-value heads", "4 layers", "4 experts"):
        assert said in text
    assert not (tmp_path / "trtllm-tp3-pp3-ep2").exists()


def test_phi_3_has_no_pipeline_stages(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "phi3")
    with pytest.raises(InvalidInput, match="is not offered by TensorRT-LLM's Phi3ForCausalLM"):
        convert(source, Parallelism(1, 2), into=tmp_path, progress=Silent())


def test_expert_parallel_without_experts(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    with pytest.raises(InvalidInput, match="the model has no experts"):
        convert(source, Parallelism(2, expert=2), into=tmp_path, progress=Silent())


def test_missing_weights_are_named(tmp_path: Path) -> None:
    tensors = make_other(tmp_path / "source", "LlamaForCausalLM")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    with pytest.raises(StageError, match=r"lacks 1 tensors: model\.layers\.2\.mlp\.up_proj\.weight"):
        convert(tmp_path / "source", Parallelism(), into=tmp_path, progress=Silent())


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantized already"):
        convert(source, Parallelism(), into=tmp_path, progress=Silent())
