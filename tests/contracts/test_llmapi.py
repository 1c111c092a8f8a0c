"""The contract of the `llmapi` model."""

from __future__ import annotations

import pytest

from pipeline.contracts import llmapi
from pipeline.contracts.version_range import is_candidate
from pipeline.errors import UserError
from tests.support.llm_standin import signature


@pytest.mark.parametrize("version", llmapi.versions())
def test_a_version_has_what_the_older_ones_have(version: str) -> None:
    names = {tensor.name for tensor in llmapi.tensors(version).inputs}
    assert {"text_input", "streaming", "sampling_param_max_tokens", "return_finish_reason"} <= names
    assert "stop" in names
    outputs = {tensor.name for tensor in llmapi.tensors(version).outputs}
    assert "total_draft_tokens" in outputs
    assert [tensor.name for tensor in llmapi.tensors(version).inputs if not tensor.optional] == ["text_input"]


def test_instances() -> None:
    assert not llmapi.has_instances("1.2.1")
    assert llmapi.versions_where(llmapi.has_instances) == "1.3.0rc29 and 1.4.0rc1"


def test_settings_of_the_model() -> None:
    assert llmapi.triton_config("1.2.1") == {
        "max_batch_size": 0,
        "decoupled": False,
        "cancellation_check_period_ms": 100,
    }


def test_an_unknown_version_names_its_neighbours() -> None:
    with pytest.raises(UserError, match=r"1\.2\.7 is not known; near: 1\.2"):
        llmapi.tensors("1.2.7")


@pytest.mark.parametrize("version", llmapi.versions())
def test_our_own_tensors_come_as_the_llm_api_heeds_them(version: str) -> None:
    own, upstream = llmapi.own_tensors(version), llmapi.tensors(version)
    names = [tensor.name for tensor in (*own.inputs, *upstream.inputs)]
    assert len(set(names)) == len(names)
    assert all(tensor.optional for tensor in own.inputs)
    newest = is_candidate(version)
    for name in ("min_p", "repetition_penalty", "bad"):
        assert (f"sampling_param_{name}" in names) is newest
    assert ("presence_penalty" in llmapi.ignored_sampling(version)) is not newest
    outputs = [tensor.name for tensor in own.outputs]
    assert "output_ids" in outputs
    assert ("prompt_log_probs" in outputs) is llmapi.returns_context_logits(version)


# Input -> argument of SamplingParams, where it has another name.
ARGUMENTS = {"logit_bias_token_ids": "embedding_bias", "logit_bias_values": "embedding_bias"}


@pytest.mark.parametrize("version", llmapi.versions())
def test_each_input_is_an_argument_that_the_llm_api_of_the_release_has(version: str) -> None:
    inputs = {
        tensor.name for tensor in (*llmapi.tensors(version).inputs, *llmapi.own_tensors(version).inputs)
    }
    sampling = {name.removeprefix("sampling_param_") for name in inputs if name.startswith("sampling_param_")}
    assert {ARGUMENTS.get(name, name) for name in sampling} <= signature(
        "SamplingParams", version
    ).parameters.keys()
    call = list(signature("LLM.generate_async", version).parameters)
    assert {"lora_request", "streaming"} <= {*call}
    assert call.index("lora_request") == 2, "where upstream's model passed `streaming`"
    assert ("priority" in inputs) is ("priority" in call)
    lora = signature("LoRARequest", version).parameters
    assert {name.replace("lora_int_id", "lora_id") for name in lora} <= inputs
