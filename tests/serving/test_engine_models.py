"""Configs of the `tensorrt` repository, for every version, size and kind of engine; and upstream's traps, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from pipeline.contracts.inflight_batcher import DataTypes, check, parameters, tensors, versions
from pipeline.models.token_ids import TokenIds
from pipeline.runtimes.tensorrt.model_repository import EngineModelSettings, TensorRTSettings, engine_models
from pipeline.triton.config import model_config, parameters_of, parse, render
from pipeline.triton.text_models import (
    KV_CACHE_STATS,
    OURS,
    OUTPUT_IDS,
    PROMPT_LOG_PROBS,
    TEXT_INPUTS,
    older_inputs,
)

IDS = TokenIds(end=2, pad=0, stop=(5, 7), vocab_size=128256)
TENSOR_PARALLEL = (1, 2, 4, 8)

data_types = st.builds(
    DataTypes,
    logits_datatype=st.sampled_from(["TYPE_FP32", "TYPE_FP16"]),
    encoder_input_features_data_type=st.just("TYPE_FP16"),
    prompt_embedding_table_data_type=st.sampled_from(["TYPE_FP16", "TYPE_BF16"]),
)
engines = st.builds(
    EngineModelSettings,
    gpus=st.sampled_from(TENSOR_PARALLEL).map(lambda size: tuple(range(size))),
    memory_fraction=st.floats(0.0001, 0.9999),
    max_kv_tokens=st.none() | st.integers(32, 10**7),
    data_types=data_types,
)
every = st.builds(
    TensorRTSettings,
    version=st.sampled_from(versions()),
    target=engines,
    draft=st.none() | engines,
    max_concurrency=st.integers(1, 2048),
    kv_cache_reuse=st.booleans(),
    chunked_context=st.booleans(),
    policy=st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    host_memory_bytes=st.sampled_from([0, 2**30, 2**40]),
    max_queue_size=st.integers(0, 1000),
    max_queue_delay_us=st.integers(0, 1000),
    decoupled=st.booleans(),
)


def settings(version: str = "1.2.1", *, draft: bool = True, **changes: Any) -> TensorRTSettings:
    values: dict[str, Any] = {
        "version": version,
        "target": EngineModelSettings(gpus=(0, 1), memory_fraction=0.8333, max_kv_tokens=65536),
        "draft": EngineModelSettings(gpus=(0,), memory_fraction=0.4, max_kv_tokens=65536) if draft else None,
        "max_concurrency": 64,
        "kv_cache_reuse": True,
        "chunked_context": True,
        "policy": "guaranteed_no_evict",
    }
    return TensorRTSettings(**(values | changes))


def models(chosen: TensorRTSettings) -> dict[str, ModelConfig]:
    return {config.name: config for config in engine_models(chosen, IDS)}


def engine_names(chosen: TensorRTSettings) -> list[str]:
    return ["tensorrt_llm"] + (["tensorrt_llm_draft"] if chosen.draft else [])


@given(every)
def test_triton_reads_what_was_meant_and_each_model_would_load(chosen: TensorRTSettings) -> None:
    have = models(chosen)
    assert list(have)[:5] == [
        "preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls",
    ]  # fmt: skip
    assert list(have)[5:] == (["tensorrt_llm_draft"] if chosen.draft else [])
    for name, config in have.items():
        assert parse(render(config)) == config
        is_engine = config.backend == "tensorrtllm"
        contract = "tensorrt_llm" if is_engine else name
        assert check(chosen.version, contract, parameters_of(config), () if is_engine else OURS) == []
        assert config.max_batch_size == chosen.max_concurrency


@given(every)
def test_the_ensemble_names_tensors_that_its_models_have(chosen: TensorRTSettings) -> None:
    have = models(chosen)
    outer = have["ensemble"]
    given = {tensor.name for tensor in outer.input}
    for step in outer.ensemble_scheduling.step:
        inner = have[step.model_name]
        assert set(step.input_map) <= {tensor.name for tensor in inner.input}
        assert set(step.output_map) <= {tensor.name for tensor in inner.output}
        assert set(step.input_map.values()) <= given
        given |= set(step.output_map.values())
    assert {tensor.name for tensor in outer.output} <= given


@given(every)
def test_types_of_logits_are_the_same_all_the_way(chosen: TensorRTSettings) -> None:
    have = models(chosen)
    for name in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
        types = {tensor.data_type for tensor in have[name].output if tensor.name.endswith("_logits")}
        assert types == {DataType.Value(chosen.target.data_types.logits_datatype)}
    if chosen.draft:
        logits = next(
            tensor for tensor in have["tensorrt_llm_draft"].output if tensor.name == "generation_logits"
        )
        assert DataType.Name(logits.data_type) == chosen.draft.data_types.logits_datatype


@given(every)
def test_draft_and_target_agree(chosen: TensorRTSettings) -> None:
    """All but where they lie and what they may take."""
    have = models(chosen)
    own = {
        "gpt_model_path",
        "gpu_device_ids",
        "kv_cache_free_gpu_mem_fraction",
        "max_tokens_in_paged_kv_cache",
    }
    first, *others = (parameters_of(have[name]) for name in engine_names(chosen))
    for other in others:
        assert {key: first[key] for key in first if key not in own} == {
            key: other[key] for key in other if key not in own
        }
        assert first["gpt_model_path"] != other["gpt_model_path"]


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("draft", [False, True])
def test_engines_are_decoupled_as_the_bls_that_streams_from_them(version: str, draft: bool) -> None:
    for wanted in (True, False):
        chosen = settings(version, draft=draft, decoupled=wanted)
        decoupled = {
            name for name, config in models(chosen).items() if config.model_transaction_policy.decoupled
        }
        assert decoupled == ({*engine_names(chosen), "tensorrt_llm_bls"} if wanted else set())


@pytest.mark.parametrize("version", versions())
def test_keys_that_the_backend_reads_without_a_net_are_there_and_empty(version: str) -> None:
    for name in engine_names(settings(version)):
        given = parameters_of(models(settings(version))[name])
        for key in ("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"):
            assert given[key] == ""


@pytest.mark.parametrize("version", versions())
def test_optional_values_are_left_out_and_not_empty(version: str) -> None:
    given = parameters_of(models(settings(version))["tensorrt_llm"])
    facts = parameters("tensorrt_llm", version)
    assert all(value or facts[key].needed == "key" for key, value in given.items())
    assert "kv_cache_host_memory_bytes" not in given
    assert "participant_ids" not in given  # only where workers are not spawned
    alone = parameters_of(
        models(settings(version, draft=False, target=EngineModelSettings((0,), 0.9)))["tensorrt_llm"]
    )
    assert "max_tokens_in_paged_kv_cache" not in alone


@pytest.mark.parametrize("version", versions())
def test_no_decoding_mode_because_none_fits_a_draft(version: str) -> None:
    assert "decoding_mode" not in parameters_of(models(settings(version))["tensorrt_llm"])


@pytest.mark.parametrize("version", versions())
def test_names_that_changed_are_the_versions_own(version: str) -> None:
    gone, expected = {"min_length", "random_seed"}, {"min_tokens", "seed"}
    have = models(settings(version))
    for name in ("tensorrt_llm", "tensorrt_llm_draft", "ensemble", "tensorrt_llm_bls"):
        names = {tensor.name for tensor in have[name].input}
        assert expected <= names
        # The entry model takes the older names, too.
        assert not gone & names or name == "tensorrt_llm_bls"
    passed = next(
        step for step in have["ensemble"].ensemble_scheduling.step if step.model_name == "tensorrt_llm"
    ).input_map
    assert expected <= set(passed)
    assert not gone & set(passed)


@pytest.mark.parametrize("version", versions())
def test_counts_of_tokens_are_tensors(version: str) -> None:
    have = models(settings(version))["tensorrt_llm_bls"]
    names = {tensor.name for tensor in (*have.input, *have.output)}
    assert {"num_input_tokens", "return_num_input_tokens"} <= names


def test_the_prompt_table_has_the_engines_type() -> None:
    chosen = DataTypes(prompt_embedding_table_data_type="TYPE_BF16")
    have = models(settings("1.0.0", target=EngineModelSettings((0,), 0.9, data_types=chosen)))
    table = next(tensor for tensor in have["tensorrt_llm"].input if tensor.name == "prompt_embedding_table")
    assert DataType.Name(table.data_type) == "TYPE_BF16"


@pytest.mark.parametrize("version", versions())
def test_paths_of_engines_are_those_of_the_container(version: str) -> None:
    for name in engine_names(settings(version)):
        given = parameters_of(models(settings(version))[name])
        assert given["gpt_model_path"] == f"/deployment/model_repository/{name}/1/engine"
        assert given["executor_worker_path"] == "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"


def test_a_fraction_is_written_without_an_exponent() -> None:
    given = parameters_of(models(settings(target=EngineModelSettings((0,), 0.00002)))["tensorrt_llm"])
    assert given["kv_cache_free_gpu_mem_fraction"] == "0.00002"


def test_the_prompt_comes_back_from_both_engines() -> None:
    """A draft and its target are called with all tokens so far, and answer with them."""
    for name in engine_names(settings()):
        assert parameters_of(models(settings())[name])["exclude_input_in_output"] == "false"


def test_the_bls_knows_the_draft_only_where_there_is_one() -> None:
    assert (
        parameters_of(models(settings())["tensorrt_llm_bls"])["tensorrt_llm_draft_model_name"]
        == "tensorrt_llm_draft"
    )
    assert "tensorrt_llm_draft_model_name" not in parameters_of(
        models(settings(draft=False))["tensorrt_llm_bls"]
    )


def test_biases_are_as_wide_as_the_engines_vocabulary() -> None:
    for name in ("preprocessing", "tensorrt_llm_bls"):
        assert parameters_of(models(settings())[name])["vocab_size"] == "128256"


def test_postprocessing_has_one_instance_because_several_reorder_a_stream() -> None:
    assert models(settings())["postprocessing"].instance_group[0].count == 1


def test_the_queue_of_the_engine_is_the_recipes() -> None:
    batching = models(settings(max_queue_size=100, max_queue_delay_us=5))["tensorrt_llm"].dynamic_batching
    assert (batching.default_queue_policy.max_queue_size, batching.max_queue_delay_microseconds) == (100, 5)


@pytest.mark.parametrize("version", versions())
def test_tensors_are_the_contracts(version: str) -> None:
    chosen = settings(version)
    for name, config in models(chosen).items():
        contract = "tensorrt_llm" if config.backend == "tensorrtllm" else name
        have = tensors(contract, version, chosen.target.data_types)
        besides, answers = (), ()
        if name == "tensorrt_llm_bls":
            besides = (*older_inputs(have.inputs), KV_CACHE_STATS, *TEXT_INPUTS)
            answers = (OUTPUT_IDS,)
        inputs = (*have.inputs, *besides)
        if name in ("preprocessing", "ensemble"):  # these say themselves what is missing
            inputs = tuple(replace(tensor, optional=True) for tensor in inputs)
        expected = model_config(name, max_batch_size=0, inputs=inputs, outputs=(*have.outputs, *answers))
        assert (config.input, config.output) == (expected.input, expected.output)


def test_log_probs_of_prompts_are_offered_where_the_engine_returns_logits() -> None:
    without = models(settings(draft=False))["tensorrt_llm_bls"]
    offering = models(settings(draft=False, prompt_log_probs=True))["tensorrt_llm_bls"]
    added = {tensor.name for tensor in offering.input} - {tensor.name for tensor in without.input}
    assert added == {"return_prompt_log_probs"}
    assert {tensor.name for tensor in PROMPT_LOG_PROBS} <= {tensor.name for tensor in offering.output}
    assert parameters_of(offering)["gather_context_logits"] == "true"
    assert "gather_context_logits" not in parameters_of(without)
