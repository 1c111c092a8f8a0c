"""The contract of the five Triton models: complete, sourced, and different where the versions differ."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
import yaml

from pipeline.contracts.inflight_batcher import (
    DataTypes,
    TensorSpec,
    ensemble_steps,
    models,
    tensors,
    versions,
)
from pipeline.contracts.inflight_batcher_parameters import parameters
from pipeline.errors import UserError

EVERY = [(model, version) for model in models() for version in versions()]
FOLDER = resources.files("pipeline.contracts").joinpath("data/inflight_batcher")


def names(model: str, version: str, way: str) -> list[str]:
    return [tensor.name for tensor in getattr(tensors(model, version), way)]


@pytest.mark.parametrize(("model", "version"), EVERY)
def test_tensors_are_whole(model: str, version: str) -> None:
    have = tensors(model, version)
    for way in (have.inputs, have.outputs):
        assert way
        assert len({tensor.name for tensor in way}) == len(way)  # each once
        for tensor in way:
            assert tensor.data_type.startswith("TYPE_")
            assert tensor.dims
    assert not any(tensor.optional for tensor in have.outputs)


@pytest.mark.parametrize("version", versions())
def test_ensemble_maps_name_tensors_that_exist(version: str) -> None:
    outer = tensors("ensemble", version)
    given = {tensor.name for tensor in outer.inputs}
    for step in ensemble_steps(version):
        have = tensors(step.model, version)
        assert set(step.input_map) <= {tensor.name for tensor in have.inputs}
        assert set(step.output_map) <= {tensor.name for tensor in have.outputs}
        assert set(step.input_map.values()) <= given
        assert {tensor.name for tensor in have.inputs if not tensor.optional} <= set(step.input_map)
        given |= set(step.output_map.values())
    assert {tensor.name for tensor in outer.outputs} <= given


def test_newest_tensors_are_as_upstream_declares_them() -> None:
    engine = tensors("tensorrt_llm", "1.2.1")
    words = TensorSpec("stop_words_list", "TYPE_INT32", (2, -1), optional=True, allow_ragged_batch=True)
    assert engine.inputs[0] == TensorSpec(
        "input_ids", "TYPE_INT32", (-1,), optional=True, allow_ragged_batch=True
    )
    assert TensorSpec("input_lengths", "TYPE_INT32", (1,), reshape=()) in engine.inputs
    assert TensorSpec("seed", "TYPE_UINT64", (1,), optional=True, reshape=()) in engine.inputs
    assert words in engine.inputs
    assert TensorSpec("context_logits", "TYPE_FP32", (-1, -1)) in engine.outputs
    assert (len(engine.inputs), len(engine.outputs)) == (62, 21)


@pytest.mark.parametrize(
    ("model", "way", "name", "first", "last"),
    [
        ("tensorrt_llm", "inputs", "min_tokens", "1.0.0", "1.2.1"),
        ("tensorrt_llm_bls", "inputs", "seed", "1.0.0", "1.2.1"),
        ("ensemble", "inputs", "return_num_input_tokens", "1.0.0", "1.2.1"),
        ("ensemble", "outputs", "num_output_tokens", "1.0.0", "1.2.1"),
        ("preprocessing", "inputs", "IMAGE_SIZES", "1.0.0", "1.2.1"),
        ("tensorrt_llm_bls", "inputs", "image_sizes_input", "1.0.0", "1.2.1"),
    ],
)
def test_names_hold_for_their_versions_only(model: str, way: str, name: str, first: str, last: str) -> None:
    known = versions()
    having = [version for version in known if name in names(model, version, way)]
    assert having == list(known[known.index(first) : known.index(last) + 1])


def test_shapes_and_types_follow_the_version() -> None:
    def url(version: str) -> tuple[int, ...]:
        return next(t.dims for t in tensors("preprocessing", version).inputs if t.name == "IMAGE_URL")

    def table(model: str, version: str) -> str:
        types = DataTypes(prompt_embedding_table_data_type="TYPE_FP32")
        return next(
            t.data_type for t in tensors(model, version, types).inputs if t.name == "prompt_embedding_table"
        )

    assert url("1.0.0") == (-1,)
    assert table("tensorrt_llm", "1.0.0") == "TYPE_FP32"
    assert table("ensemble", "1.2.1") == "TYPE_FP16"  # upstream never made this one a choice


def test_parameters_of_the_engine() -> None:
    keys = parameters("tensorrt_llm", "1.2.1")
    assert {"gpt_model_type", "gpt_model_path", "tokenizer_dir", "xgrammar_tokenizer_info_path"} <= set(keys)
    assert parameters("ensemble", "1.2.1") == {}


def test_what_is_not_known_is_refused_with_what_is_near() -> None:
    with pytest.raises(UserError, match=r"TensorRT-LLM 1\.2\.9 is not known; known: .*1\.2\.1"):
        tensors("ensemble", "1.2.9")
    with pytest.raises(UserError, match=r"preprocesing is not a model .* known: preprocessing"):
        tensors("preprocesing", "1.2.1")
    with pytest.raises(UserError, match="logits_datatype = TYPE_BF16: must be one of TYPE_FP32, TYPE_FP16"):
        tensors("ensemble", "1.2.1", DataTypes(logits_datatype="TYPE_BF16"))


@pytest.mark.parametrize("name", [entry.name for entry in FOLDER.iterdir() if entry.name.endswith(".yaml")])
def test_every_source_is_one_of_the_index(name: str) -> None:
    known = set(yaml.safe_load(FOLDER.joinpath("index.yaml").read_text("utf-8"))["sources"])

    def cited(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = set(node["source"]) if "source" in node else set()
            return own.union(*(cited(child) for key, child in node.items() if key != "source"))
        return set().union(*map(cited, node)) if isinstance(node, list) else set()

    assert cited(yaml.safe_load(FOLDER.joinpath(name).read_text("utf-8"))) <= known
