"""config.pbtxt: what is written is what Triton reads, whatever the values; and nothing is ever left to be filled in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipeline.contracts.inflight_batcher import (
    EnsembleStep,
    TensorSpec,
    ensemble_steps,
    models,
    parameters,
    tensors,
    versions,
)
from pipeline.errors import StageError
from pipeline.models.token_ids import TokenIds
from pipeline.runtimes.cpu.model_repository import CpuSettings, cpu_models
from pipeline.triton.config import dynamic_batching, model_config, parameters_of, parse, render
from pipeline.triton.text_models import (
    ENGINE_INPUTS,
    KV_CACHE_STATS,
    MIN_P,
    OUTPUT_IDS,
    PROMPT_LOG_PROBS,
    RETURN_PROMPT_LOG_PROBS,
    TEXT_INPUTS,
    older_inputs,
)

texts = st.text(min_size=1, max_size=12).filter(lambda text: "${" not in text)
sizes = st.lists(st.integers(-1, 4096), min_size=1, max_size=4).map(tuple)
types = st.sampled_from(["TYPE_INT32", "TYPE_FP32", "TYPE_STRING", "TYPE_BOOL", "TYPE_UINT64"])
inputs = st.builds(
    TensorSpec, name=texts, data_type=types, dims=sizes, optional=st.booleans(), allow_ragged_batch=st.booleans(),
    reshape=st.none() | st.just(()) | sizes,
)  # fmt: skip
outputs = st.builds(TensorSpec, name=texts, data_type=types, dims=sizes, reshape=st.none() | sizes)
names = st.dictionaries(texts, texts, max_size=3)
steps = st.builds(EnsembleStep, model=texts, input_map=names, output_map=names)
common = {
    "name": texts,
    "max_batch_size": st.integers(0, 4096),
    "inputs": st.lists(inputs, max_size=4).map(tuple),
    "outputs": st.lists(outputs, max_size=4).map(tuple),
    "parameters": names,
}
batching = st.none() | st.builds(
    dynamic_batching,
    preferred_batch_size=st.none() | st.integers(1, 512),
    max_queue_delay_us=st.integers(0, 10**6),
    max_queue_size=st.integers(0, 10**6),
)
executed = st.builds(
    model_config,
    backend=texts,
    instances=st.integers(0, 64),
    decoupled=st.booleans(),
    dynamic_batching=batching,
    **common,
)
ensembles = st.builds(model_config, steps=st.lists(steps, min_size=1, max_size=3).map(tuple), **common)


@given(executed | ensembles)
def test_what_is_written_is_what_triton_reads(config: ModelConfig) -> None:
    assert parse(render(config)) == config


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("model", models())
def test_every_model_of_every_version_can_be_written(model: str, version: str) -> None:
    have = tensors(model, version)
    config = model_config(
        model,
        backend="" if model == "ensemble" else "python",
        max_batch_size=8,
        inputs=have.inputs,
        outputs=have.outputs,
        steps=ensemble_steps(version) if model == "ensemble" else (),
    )
    text = render(config)
    assert parse(text) == config
    assert [field.name for field in config.input] == [tensor.name for tensor in have.inputs]
    assert text.count("\ninput {") == len(have.inputs)  # a line each


def test_a_placeholder_is_refused() -> None:
    config = model_config(
        "m", max_batch_size=8, inputs=(), outputs=(), parameters={"tokenizer_dir": "${tokenizer_dir}"}
    )
    with pytest.raises(StageError, match=r"m/config\.pbtxt: a placeholder is left: .*tokenizer_dir"):
        render(config)


def test_a_type_that_triton_does_not_have_is_refused() -> None:
    with pytest.raises(StageError, match=r"m/config\.pbtxt: .*TYPE_NONSENSE"):
        model_config("m", max_batch_size=8, inputs=(TensorSpec("x", "TYPE_NONSENSE", (1,)),), outputs=())


def test_text_that_is_none_is_refused() -> None:
    with pytest.raises(StageError, match=r"config\.pbtxt: "):
        parse("name: {")


def by_name(given: Any) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in given}


@pytest.mark.parametrize("draft", [0, 4])
def test_the_cpu_models_have_upstreams_tensors_and_only_known_parameters(draft: int) -> None:
    ours = {"end_id", "pad_id", "stop_token_ids", "vocab_size", "tokenizer_dir", "add_special_tokens"}
    ours |= {"skip_special_tokens", "cancellation_check_period_ms", "tokens_per_block"}
    ours |= {"engine_takes_prior_output"}
    text = (KV_CACHE_STATS, MIN_P, RETURN_PROMPT_LOG_PROBS, *TEXT_INPUTS)
    for config in cpu_models(CpuSettings(512, 256, 16, max_draft_tokens=draft), TokenIds(5, 0, (2,), 2048)):
        have = tensors(config.name, "1.2.1")
        besides = {
            "preprocessing": (),
            "postprocessing": (),
            "ensemble": (KV_CACHE_STATS,),
            "tensorrt_llm_bls": (*older_inputs(have.inputs), *text),
        }.get(config.name, ENGINE_INPUTS)
        own_outputs = PROMPT_LOG_PROBS if RETURN_PROMPT_LOG_PROBS in besides else ()
        if config.name == "tensorrt_llm_bls":
            own_outputs = (OUTPUT_IDS, *own_outputs)
        inputs = (*have.inputs, *besides)
        if config.name in {"ensemble", "preprocessing"}:  # say themselves what is missing
            inputs = tuple(replace(tensor, optional=True) for tensor in inputs)
        expected = model_config(
            config.name,
            max_batch_size=0,
            inputs=inputs,
            outputs=(*have.outputs, *own_outputs),
        )
        assert by_name(config.input) == by_name(expected.input)
        assert by_name(config.output) == by_name(expected.output)
        given = parameters_of(config)
        unknown = set(given) - set(parameters(config.name, "1.2.1")) - ours
        assert all(name.startswith("cpu_") for name in unknown)
        assert not any(value.startswith("/") for value in given.values())
        assert config.model_transaction_policy.decoupled == (
            config.name in {"tensorrt_llm", "tensorrt_llm_bls"}
        )
