"""Sampling parameters: bounds, all faults at once, and the tensors that carry them in each layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pipeline.client import Refused
from pipeline.client.request import build_request, missing_inputs
from pipeline.client.sampling import PARAMETERS, Sampling, read_sampling
from pipeline.client.tensors import read_signature
from pipeline.client.testing import bls, llmapi
from pipeline.client.testing.reply import read_request
from pipeline.client.testing.server import admission_fault

GOOD: dict[str, Any] = {
    "max_tokens": 16, "min_tokens": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 2**64 - 1,
    "stop": ["\n", "###"], "bad_words": "bad", "repetition_penalty": 1.1, "presence_penalty": -0.5,
    "frequency_penalty": 0.5, "length_penalty": 1.0, "end_id": -1, "num_draft_tokens": 3, "log_probs": True,
    "guide_type": "regex", "guide": "[0-9]+", "min_p": 0.25, "stop_token_ids": [3, 5],
    "include_stop_str_in_output": True, "skip_special_tokens": False, "logit_bias": {7: -1.5, 9: 100.0},
    "prompt_log_probs": 0, "token_ids": True, "adapter": "tone",
}  # fmt: skip
# These go with others only.
UNGUIDED = {"max_tokens": 4, "top_log_probs": 3, "log_probs": True, "ignore_eos": True}
# The `llmapi` model's alone.
LLMAPI = {"max_tokens": 4, "priority": 0.75}


def sent(config: Any, **sampling: Any) -> dict[str, list[Any]]:
    """The tensors of a request, which the model would let in."""
    request = build_request(read_signature(config), "Hi", read_sampling(sampling), request_id="r1")
    assert admission_fault(config, request) is None
    return dict(read_request(request, {}).tensors)


def test_there_is_one_parameter_for_each_name() -> None:
    assert set(PARAMETERS) == set(Sampling.__annotations__) == {*GOOD, *UNGUIDED, *LLMAPI}


def test_every_parameter_reaches_its_tensor() -> None:
    tensors = sent(bls(), **GOOD)
    expected = {
        **GOOD,
        "stop_words": GOOD["stop"],
        "return_log_probs": True,
        "text_input": "Hi",
        "stream": True,
    }
    expected |= {f"guided_decoding_{name}": expected.pop(name) for name in ("guide_type", "guide")}
    expected["lora_name"] = expected.pop("adapter")
    bias = expected.pop("logit_bias")
    expected |= {"logit_bias_token_ids": list(bias), "logit_bias_values": list(bias.values())}
    expected["return_prompt_log_probs"] = expected.pop("prompt_log_probs")
    expected["return_output_ids"] = expected.pop("token_ids")
    del expected["stop"], expected["log_probs"]
    for name, value in expected.items():
        assert tensors[name] == pytest.approx(value if isinstance(value, list) else [value]), name


def test_the_likeliest_tokens_are_read_from_logits() -> None:
    with pytest.raises(Refused, match="does not take top_log_probs"):
        sent(llmapi(upstream=True), **{**UNGUIDED, "ignore_eos": None})
    assert sent(llmapi(), **UNGUIDED)["sampling_param_logprobs"] == [3]
    assert sent(llmapi(), max_tokens=4, log_probs=True)["sampling_param_logprobs"] == [0]
    assert sent(bls(), **UNGUIDED)["return_generation_logits"] == [True]
    request = build_request(read_signature(bls()), "Hi", read_sampling(UNGUIDED), request_id="r1")
    assert "generation_logits" in {output.name for output in request.outputs}


def test_the_llmapi_model_has_names_of_its_own() -> None:
    assert sent(llmapi(), **LLMAPI)["priority"] == [0.75]
    tensors = sent(llmapi(), max_tokens=16, temperature=0.5, stop="\n", seed=3)
    assert tensors["sampling_param_max_tokens"] == [16]
    assert tensors["sampling_param_temperature"] == [0.5]
    assert tensors["sampling_param_stop"] == ["\n"]
    assert tensors["streaming"] == [True]


def test_temperature_zero_is_top_k_one() -> None:
    tensors = sent(bls(), max_tokens=4, temperature=0, top_p=0.5, top_k=40)
    assert tensors["top_k"] == [1]
    assert "temperature" not in tensors
    assert "top_p" not in tensors


def test_what_is_none_or_false_is_left_out() -> None:
    tensors = sent(bls(), max_tokens=4, temperature=None, log_probs=False)
    assert "temperature" not in tensors
    assert "return_log_probs" not in tensors


def test_end_tokens_are_ignored_by_having_none_where_the_model_has_no_other_way() -> None:
    assert sent(bls(), max_tokens=4, ignore_eos=True)["end_id"] == [-1]
    assert sent(bls(upstream=True), max_tokens=4, ignore_eos=True)["end_id"] == [-1]
    tensors = sent(llmapi(), max_tokens=4, ignore_eos=True)
    assert tensors["sampling_param_ignore_eos"] == [True]
    assert "end_id" not in sent(bls(), max_tokens=4, ignore_eos=False)
    with pytest.raises(Refused, match="ignore_eos: cannot be beside end_id = 3"):
        read_sampling({"ignore_eos": True, "end_id": 3})


def test_what_has_no_effect_is_not_refused_by_a_model_without_an_input_for_it() -> None:
    neutral = {name: parameter.neutral for name, parameter in PARAMETERS.items()}
    sent(llmapi(upstream=True), **{**neutral, "max_tokens": 4})
    with pytest.raises(Refused) as caught:
        sent(bls(upstream=True), max_tokens=4, skip_special_tokens=False, min_p=0.1, prompt_log_probs=0)
    for name in ("skip_special_tokens", "min_p", "prompt_log_probs"):
        assert f"does not take {name}" in str(caught.value)


def test_inputs_that_a_model_lacks_are_told_by_the_parameters_that_need_them() -> None:
    """A parameter that another one carries needs the input of that one."""
    greedy: dict[str, Any] = {"temperature": 0, "top_k": 5, "min_p": 0.5, "ignore_eos": True}
    assert missing_inputs(read_signature(bls(upstream=True)), greedy) == []
    assert missing_inputs(read_signature(bls(upstream=True)), {**greedy, "temperature": 1}) == ["min_p"]
    bare = bls()
    for tensor in [tensor for tensor in bare.input if tensor.name in ("top_k", "end_id")]:
        bare.input.remove(tensor)
    assert missing_inputs(read_signature(bare), greedy) == ["temperature", "ignore_eos"]
    with pytest.raises(Refused, match=r"does not take temperature; .* does not take ignore_eos"):
        sent(bare, max_tokens=4, **greedy)


def test_a_model_that_answers_at_once_is_not_asked_to_stream() -> None:
    tensors = sent(bls(decoupled=False), max_tokens=4)
    assert tensors["stream"] == [False]
    assert tensors["exclude_input_in_output"] == [True]


def test_numpy_numbers_are_numbers() -> None:
    assert read_sampling({"max_tokens": np.int64(4), "temperature": np.float32(0.5)}) == {
        "max_tokens": 4,
        "temperature": 0.5,
    }


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("max_tokens", 0, "must be at least 1 and at most 2147483647"),
        ("max_tokens", True, "must be a whole number"),
        ("temperature", math.nan, "must be a finite number"),
        ("repetition_penalty", 1e308, "must be within float32: of a size from 1.17549e-38 to 3.40282e[+]38"),
        ("temperature", "hot", "must be a finite number"),
        ("top_p", 0, "must be more than 0 and at most 1"),
        ("seed", 2**64, "at most 18446744073709551615"),
        ("stop", ["a", ""], "none of them empty"),
        ("stop", [1], "a text or a list of texts"),
        ("stop", ["\ud83d"], "text that UTF-8 can encode"),
        ("log_probs", 1, "must be True or False"),
        ("stop_token_ids", [1, -1], "a list of token ids, whole numbers from 0 to 2147483647"),
        ("stop_token_ids", [True], "a list of token ids"),
        ("stop_token_ids", "abc", "a list of token ids"),
        ("logit_bias", {"a": 1}, "a list of token ids"),
        ("logit_bias", [1], r"must be numbers by token id, such as \{15: -100\}"),
    ],
)
def test_a_bad_value_says_what_would_be_right(name: str, value: object, problem: str) -> None:
    with pytest.raises(Refused, match=problem) as caught:
        read_sampling({name: value})
    assert str(caught.value).startswith(f"{name} = {value!r}: ")


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(Refused) as caught:
        read_sampling({"temprature": 1, "top_k": -1, "min_tokens": 9, "max_tokens": 8})
    message = str(caught.value)
    assert "unknown parameter 'temprature' (did you mean 'temperature'?)" in message
    assert "top_k = -1" in message
    assert "min_tokens = 9: must be at most max_tokens = 8" in message


def test_what_the_model_has_no_tensor_for_is_refused_by_name() -> None:
    with pytest.raises(
        Refused, match=r"model 'tensorrt_llm' does not take bad_words; .* does not take log_probs"
    ):
        sent(llmapi(upstream=True), max_tokens=4, bad_words="x", log_probs=True)


def test_what_the_model_needs_is_named() -> None:
    with pytest.raises(Refused, match="model 'tensorrt_llm_bls' needs max_tokens"):
        sent(bls())


def test_a_model_of_tokens_is_no_entry_model() -> None:
    config = bls("tensorrt_llm")
    config.input[0].name = "input_ids"
    with pytest.raises(Refused, match="ask its entry model"):
        sent(config, max_tokens=4)
