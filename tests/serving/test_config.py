"""config.pbtxt: what is written is what Triton reads, whatever the values; and nothing is ever left to be filled in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipeline.contracts.inflight_batcher import EnsembleStep, TensorSpec, parameters, tensors
from pipeline.errors import StageError
from pipeline.models.token_ids import TokenIds
from pipeline.runtimes.cpu.model_repository import CpuSettings, cpu_models
from pipeline.triton.config import dynamic_batching, model_config, parameters_of, parse, render
from pipeline.triton.text_models import OURS

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
@settings(max_examples=20)
def test_what_is_written_is_what_triton_reads(config: ModelConfig) -> None:
    assert parse(render(config)) == config


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


@pytest.mark.parametrize("draft", [0, 4])
def test_the_cpu_models_have_upstreams_tensors_and_only_known_parameters(draft: int) -> None:
    for config in cpu_models(CpuSettings(512, 256, 16, max_draft_tokens=draft), TokenIds(5, 0, (2,), 2048)):
        have = tensors(config.name, "1.2.1")
        assert {tensor.name for tensor in have.inputs} <= {tensor.name for tensor in config.input}
        assert {tensor.name for tensor in have.outputs} <= {tensor.name for tensor in config.output}
        given = parameters_of(config)
        unknown = set(given) - set(parameters(config.name, "1.2.1")) - OURS
        assert all(name.startswith("cpu_") for name in unknown)
        assert not any(value.startswith("/") for value in given.values())
