"""The five Triton models by version: whole tensors, and every way in which a parameter can be wrong."""

from __future__ import annotations

import pytest

from pipeline.contracts.inflight_batcher import (
    DataTypes,
    TensorSpec,
    check,
    ensemble_steps,
    models,
    parameters,
    tensors,
    versions,
)
from pipeline.errors import UserError

EVERY = [(model, version) for model in models() for version in versions()]


def test_tensors_are_whole() -> None:
    for model, version in EVERY:
        have = tensors(model, version)
        for way in (have.inputs, have.outputs):
            assert way
            assert len({tensor.name for tensor in way}) == len(way), "each once"
            assert all(tensor.data_type.startswith("TYPE_") and tensor.dims for tensor in way)
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


def test_what_is_not_known_is_refused_with_what_is_near() -> None:
    with pytest.raises(UserError, match=r"TensorRT-LLM 1\.2\.9 is not known; near: .*1\.2\.1"):
        tensors("ensemble", "1.2.9")
    with pytest.raises(UserError, match=r"preprocesing is not a model .* known: preprocessing"):
        tensors("preprocesing", "1.2.1")
    with pytest.raises(UserError, match="logits_datatype = TYPE_BF16: must be one of TYPE_FP32, TYPE_FP16"):
        tensors("ensemble", "1.2.1", DataTypes(logits_datatype="TYPE_BF16"))


REQUIRED = {  # the least with which each model loads
    "preprocessing": {"tokenizer_dir": "1/tokenizer", "multimodal_model_path": ""},
    "postprocessing": {"tokenizer_dir": "1/tokenizer"},
    "tensorrt_llm": {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": "/engine",
        "tokenizer_dir": "",
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
    },
    "ensemble": {},
    "tensorrt_llm_bls": {},
}


def test_the_least_is_enough_and_each_part_of_it_is_needed() -> None:
    for model, version in EVERY:
        facts = parameters(model, version)
        defaults = {name: fact.default for name, fact in facts.items() if fact.default is not None}
        for given in (REQUIRED[model], REQUIRED[model] | defaults):
            assert check(version, model, given) == []
        for name in REQUIRED[model]:
            rest = {other: value for other, value in REQUIRED[model].items() if other != name}
            (fault,) = check(version, model, rest)
            assert fault.startswith(f"{model}: {name}: is missing")
        assert all(bool(fact.values) == (fact.kind == "choice") for fact in facts.values())


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("key", ["tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"])
def test_keys_that_the_backend_reads_without_a_net_must_exist_but_may_be_empty(
    version: str, key: str
) -> None:
    assert parameters("tensorrt_llm", version)[key].needed == "key"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_beam_width", "two", "max_beam_width = two: must be a whole number, at least 1"),
        ("max_beam_width", "0", "max_beam_width = 0: must be a whole number, at least 1"),
        ("kv_cache_free_gpu_mem_fraction", "1.0", "must be a number above 0 and below 1"),
        ("kv_cache_free_gpu_mem_fraction", "nan", "must be a number above 0 and below 1"),
        ("gpu_weights_percent", "1.5", "must be a number above 0 and at most 1"),
        ("enable_kv_cache_reuse", "yes", "must be true or false"),
        ("batch_scheduler_policy", "evict", "must be one of max_utilization, guaranteed_no_evict"),
        ("decoding_mode", "draft_target", "must be one of top_k, "),
        ("gpu_device_ids", "0,1,;2", "a comma inside an instance and a semicolon between"),
        ("max_attention_window_size", "1024;", "must be whole numbers between commas"),
        ("num_nodes", "", "num_nodes: is empty; give it a value, or leave it out"),
        ("gpt_model_path", "", "gpt_model_path: is empty; give it a value"),
        ("gpt_model_path", "${engine_dir}", "a placeholder is left"),
        ("enable_chunked_contxt", "true", "did you mean enable_chunked_context?"),
        ("cpu_threads", "2", "cpu_threads: is not read by this version"),
        (
            "decoding_mode",
            "lookahead",
            "lookahead_window_size: is missing, and decoding_mode = lookahead needs it",
        ),
    ],
)
def test_each_fault_is_said(name: str, value: str, said: str) -> None:
    faults = check("1.2.1", "tensorrt_llm", REQUIRED["tensorrt_llm"] | {name: value})
    assert any(said in fault for fault in faults), faults


def test_parameters_of_our_own_sources_pass_where_they_are_named() -> None:
    given = REQUIRED["preprocessing"] | {"vocab_size": "32000"}
    assert check("1.2.1", "preprocessing", given) == [
        "preprocessing: vocab_size: is not read by this version"
    ]
    assert check("1.2.1", "preprocessing", given, own={"vocab_size"}) == []
