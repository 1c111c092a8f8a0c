"""Configs of the `tensorrt` repository, for every version, size and kind of engine; and upstream's traps, by name."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from pipeline.contracts.inflight_batcher import DataTypes, check, parameters, tensors, versions
from pipeline.models.token_ids import TokenIds
from pipeline.runtimes.tensorrt.model_repository import EngineModelSettings, TensorRTSettings, engine_models
from pipeline.triton.config import parameters_of, parse, render
from pipeline.triton.text_models import KV_CACHE_STATS, OURS, TEXT_INPUTS

IDS = TokenIds(end=2, pad=0, stop=(5, 7), vocab_size=128256)
# Each writes the configs of a whole repository.
FEW = hypothesis.settings(max_examples=12)
ENTRY_INPUTS = {KV_CACHE_STATS.name, "min_length", "random_seed", *(tensor.name for tensor in TEXT_INPUTS)}

data_types = st.builds(
    DataTypes,
    logits_datatype=st.sampled_from(["TYPE_FP32", "TYPE_FP16"]),
    encoder_input_features_data_type=st.just("TYPE_FP16"),
    prompt_embedding_table_data_type=st.sampled_from(["TYPE_FP16", "TYPE_BF16"]),
)
engines = st.builds(
    EngineModelSettings,
    gpus=st.sampled_from((1, 2, 4, 8)).map(lambda size: tuple(range(size))),
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


@FEW
@hypothesis.given(every)
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


@FEW
@hypothesis.given(every)
def test_the_ensemble_names_tensors_that_its_models_have(chosen: TensorRTSettings) -> None:
    have = models(chosen)
    outer = have["ensemble"]
    known = {tensor.name for tensor in outer.input}
    for step in outer.ensemble_scheduling.step:
        inner = have[step.model_name]
        assert set(step.input_map) <= {tensor.name for tensor in inner.input}
        assert set(step.output_map) <= {tensor.name for tensor in inner.output}
        assert set(step.input_map.values()) <= known
        known |= set(step.output_map.values())
    assert {tensor.name for tensor in outer.output} <= known


@FEW
@hypothesis.given(every)
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


@FEW
@hypothesis.given(every)
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


def given(chosen: TensorRTSettings, model: str = "tensorrt_llm") -> dict[str, str]:
    """Parameters of a model."""
    return parameters_of(models(chosen)[model])


@pytest.mark.parametrize("draft", [False, True])
def test_engines_are_decoupled_as_the_bls_that_streams_from_them(draft: bool) -> None:
    for wanted in (True, False):
        chosen = settings(draft=draft, decoupled=wanted)
        decoupled = {
            name for name, config in models(chosen).items() if config.model_transaction_policy.decoupled
        }
        assert decoupled == ({*engine_names(chosen), "tensorrt_llm_bls"} if wanted else set())


@pytest.mark.parametrize("version", versions())
def test_parameters_that_upstreams_backend_stumbles_over(version: str) -> None:
    chosen, facts = settings(version), parameters("tensorrt_llm", version)
    for name in engine_names(chosen):
        engine = given(chosen, name)
        for key in ("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path"):
            assert engine[key] == "", "it is read without a net"
        assert all(value or facts[key].needed == "key" for key, value in engine.items())
        assert engine["gpt_model_path"] == f"/deployment/model_repository/{name}/1/engine"
        assert engine["executor_worker_path"] == "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
        assert engine["exclude_input_in_output"] == "false", (
            "draft and target are called with all tokens so far"
        )
        assert "decoding_mode" not in engine, "none fits a draft"
        assert "kv_cache_host_memory_bytes" not in engine
        assert "participant_ids" not in engine, "only where workers are not spawned"
    alone = settings(version, draft=False, target=EngineModelSettings((0,), 0.00002))
    assert "max_tokens_in_paged_kv_cache" not in given(alone)
    assert given(alone)["kv_cache_free_gpu_mem_fraction"] == "0.00002", "without an exponent"
    assert given(chosen, "tensorrt_llm_bls")["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    assert "tensorrt_llm_draft_model_name" not in given(alone, "tensorrt_llm_bls")
    for name in ("preprocessing", "tensorrt_llm_bls"):
        assert given(chosen, name)["vocab_size"] == "128256", "biases are as wide as the engine's vocabulary"
    instances = models(chosen)["postprocessing"].instance_group[0].count
    assert instances == 1, "several reorder a stream"


@pytest.mark.parametrize("version", versions())
def test_tensors_are_the_contracts(version: str) -> None:
    chosen, gone, expected = settings(version), {"min_length", "random_seed"}, {"min_tokens", "seed"}
    have = models(chosen)
    for name, config in have.items():
        contract = "tensorrt_llm" if config.backend == "tensorrtllm" else name
        declared = tensors(contract, version, chosen.target.data_types)
        inputs, outputs = ({tensor.name for tensor in found} for found in (config.input, config.output))
        entry = name == "tensorrt_llm_bls"
        assert inputs - {tensor.name for tensor in declared.inputs} == (ENTRY_INPUTS if entry else set())
        assert outputs - {tensor.name for tensor in declared.outputs} == ({"output_ids"} if entry else set())
        if name not in ("preprocessing", "postprocessing"):
            assert expected <= inputs
            assert entry or not gone & inputs, "the entry model takes the older names, too"
    steps = {step.model_name: set(step.input_map) for step in have["ensemble"].ensemble_scheduling.step}
    assert expected <= steps["tensorrt_llm"]
    assert not gone & steps["tensorrt_llm"]


def test_the_prompt_table_has_the_engines_type() -> None:
    chosen = DataTypes(prompt_embedding_table_data_type="TYPE_BF16")
    have = models(settings("1.0.0", target=EngineModelSettings((0,), 0.9, data_types=chosen)))
    table = next(tensor for tensor in have["tensorrt_llm"].input if tensor.name == "prompt_embedding_table")
    assert DataType.Name(table.data_type) == "TYPE_BF16"


def test_the_queue_of_the_engine_is_the_recipes() -> None:
    batching = models(settings(max_queue_size=100, max_queue_delay_us=5))["tensorrt_llm"].dynamic_batching
    assert (batching.default_queue_policy.max_queue_size, batching.max_queue_delay_microseconds) == (100, 5)


def test_log_probs_of_prompts_are_offered_where_the_engine_returns_logits() -> None:
    without, offering = settings(draft=False), settings(draft=False, prompt_log_probs=True)
    added = [
        {tensor.name for tensor in getattr(models(offering)["tensorrt_llm_bls"], side)}
        - {tensor.name for tensor in getattr(models(without)["tensorrt_llm_bls"], side)}
        for side in ("input", "output")
    ]
    assert added == [{"return_prompt_log_probs"}, {"prompt_log_probs", "prompt_log_probs_ids"}]
    assert given(offering, "tensorrt_llm_bls")["gather_context_logits"] == "true"
    assert "gather_context_logits" not in given(without, "tensorrt_llm_bls")
