"""What the engine cannot honour is refused by the name of the input, in one line, and harms nobody else."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from pipeline.contracts.inflight_batcher import TensorSpec, tensors
from pipeline.serving.server import TritonServer
from tests.support.streams import joined, stream

ENGINE = {
    "input_ids": np.array([[1, 3, 629, 4]], np.int32),
    "input_lengths": np.array([[4]], np.int32),
    "request_output_len": np.array([[4]], np.int32),
}
TEXT = {"text_input": "Hello", "max_tokens": 4, "stream": True}
_ARRAYS = {
    "TYPE_INT32": np.int32, "TYPE_INT64": np.int64, "TYPE_UINT64": np.uint64, "TYPE_FP32": np.float32,
    "TYPE_FP16": np.float16, "TYPE_BOOL": np.bool_, "TYPE_UINT8": np.uint8,
}  # fmt: skip

# Inputs of the engine that another test sends; each of the others must be refused.
HONOURED = {
    "input_ids", "input_lengths", "request_output_len", "draft_input_ids", "draft_logits",
    "draft_acceptance_threshold", "return_generation_logits", "end_id", "pad_id", "stop_words_list",
    "bad_words_list", "embedding_bias", "temperature", "runtime_top_k", "runtime_top_p", "runtime_top_p_min",
    "runtime_top_p_decay", "runtime_top_p_reset_ids", "repetition_penalty", "min_tokens", "presence_penalty",
    "frequency_penalty", "seed", "return_log_probs", "return_perf_metrics", "return_num_input_tokens",
    "return_num_output_tokens", "exclude_input_in_output", "stop", "streaming", "decoder_input_lengths",
    "guided_decoding_guide_type", "guided_decoding_guide",
}  # fmt: skip
OTHERS = [tensor for tensor in tensors("tensorrt_llm", "1.2.1").inputs if tensor.name not in HONOURED]


def asking(declared: TensorSpec) -> np.ndarray:
    """A value that asks for something: all twos (or true), of two elements where any number is allowed."""
    shape = [1, *(2 if size == -1 else size for size in declared.dims)]
    if declared.data_type == "TYPE_STRING":
        return np.full(shape, b"json", np.object_)
    return np.full(shape, 2, _ARRAYS[declared.data_type])


def error_of(url: str, model: str, **inputs: object) -> str:
    with pytest.raises(InferenceServerException) as caught:
        list(stream(url, model, **inputs))
    message = caught.value.message()
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def test_every_other_input_of_the_engine_is_refused_by_name(server: TritonServer) -> None:
    for declared in OTHERS:
        message = error_of(server.grpc_url, "tensorrt_llm", **ENGINE, **{declared.name: asking(declared)})
        assert message.startswith(declared.name)


def test_values_that_ask_for_nothing_are_let_through(server: TritonServer) -> None:
    neutral = {
        "beam_width": 1, "num_return_sequences": 1, "length_penalty": 1.0, "return_context_logits": False,
        "return_generation_logits": False, "num_draft_tokens": 0, "use_draft_logits": False, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "temperature": 1.0, "top_k": 1, "top_p": 0.0,
        "min_tokens": 0, "bad_words": [""], "stop_words": [""],
    }  # fmt: skip
    assert joined(server.grpc_url, "tensorrt_llm_bls", **TEXT, **neutral) == joined(
        server.grpc_url, "tensorrt_llm_bls", **TEXT
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"max_tokens": 0}, "max_tokens = [[0]]: must be 1 or more"),
        ({"max_tokens": 9999}, "request_output_len = 9999: must be 1 to 700 tokens here"),
        ({"text_input": "word " * 400}, "input_lengths = "),
        ({"text_input": np.array([[b"\xff\xfe"]], np.object_)}, "text_input: is not UTF-8"),
        ({"beam_width": 2}, "beam_width = 2: "),
        ({"num_draft_tokens": 4}, "num_draft_tokens = 4: there is no draft model beside this one"),
        (
            {"guided_decoding_guide_type": "yaml"},
            "guided_decoding_guide_type = yaml: must be json, json_schema",
        ),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide: is missing, and regex needs one"),
        (
            {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": '{"type": "strnig"}'},
            "guided_decoding_guide: cannot be held to as json_schema: Invalid type: strnig",
        ),
        ({"image_url_input": "http://x/y.png"}, "image_url_input: this model takes text only"),
        ({"temperature": -1.0}, "temperature = -1.0: must be 0, or"),
        ({"top_p": 1.5}, "top_p = 1.5: must be"),
        ({"embedding_bias_words": ["a"]}, "embedding bias: 1 words, 0 weights; one for each"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_entry_model_says_what_is_wrong(
    server: TritonServer, inputs: dict[str, object], message: str
) -> None:
    assert error_of(server.grpc_url, "tensorrt_llm_bls", **{**TEXT, **inputs}).startswith(message)
    if "beam_width" in inputs:
        assert message in error_of(server.grpc_url, "ensemble", **TEXT, **inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_lengths": np.array([[0]], np.int32)}, "input_ids: the prompt has no tokens"),
        ({"input_lengths": np.array([[9]], np.int32)}, "input_lengths = 9: input_ids has 4 tokens only"),
        (
            {"input_ids": np.array([[1, 2, 3, 99999]], np.int32)},
            "token_id = 99999: token ids must be 0 to 2047",
        ),
        ({"stop_words_list": np.array([[[5, 6], [2, 1]]], np.int32)}, "stop_words_list: has ends [2, 1]"),
        ({"draft_input_ids": np.array([[1] * 50], np.int32)}, "draft_input_ids: 50 tokens; at most 5 here"),
        ({"stop": np.array([[True]])}, "stop: the request id says what is to be stopped"),
        ({"embedding_bias": np.zeros((1, 7), np.float32)}, "embedding_bias: has shape (7,)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_engine_says_what_is_wrong(server: TritonServer, inputs: dict[str, object], message: str) -> None:
    assert error_of(server.grpc_url, "tensorrt_llm", **{**ENGINE, **inputs}).startswith(message)


MISSING = {
    "tensorrt_llm_bls": {**TEXT, "temperature": 1.0},
    "ensemble": {**TEXT, "temperature": 1.0},
    "tensorrt_llm": {**ENGINE, "temperature": 1.0},
    "preprocessing": {"QUERY": "Hello", "REQUEST_OUTPUT_LEN": 4, "STOP_WORDS_DICT": ["."]},
}


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ("tensorrt_llm_bls", "text_input", "text_input: is missing"),
        ("tensorrt_llm_bls", "max_tokens", "max_tokens: is missing"),
        ("ensemble", "text_input", "QUERY (text_input of the ensemble): is missing"),
        ("ensemble", "max_tokens", "REQUEST_OUTPUT_LEN (max_tokens of the ensemble): is missing"),
        ("tensorrt_llm", "input_ids", "input_ids: the prompt has no tokens"),
        ("tensorrt_llm", "input_lengths", "input_lengths: is missing"),
        ("tensorrt_llm", "request_output_len", "request_output_len = 0: must be 1 to"),
        ("preprocessing", "QUERY", "QUERY (text_input of the ensemble): is missing"),
        ("preprocessing", "REQUEST_OUTPUT_LEN", "REQUEST_OUTPUT_LEN (max_tokens of the ensemble): is missing"),
    ],
)  # fmt: skip
def test_an_input_that_is_missing_is_named(server: TritonServer, model: str, name: str, message: str) -> None:
    """Triton counts inputs only, and each of these has optional ones enough: none may wait, or end without a word."""
    inputs = {other: value for other, value in MISSING[model].items() if other != name}
    assert message in error_of(server.grpc_url, model, **inputs)


def test_preprocessing_takes_text_only(server: TritonServer) -> None:
    declared = {tensor.name: tensor for tensor in tensors("preprocessing", "1.2.1").inputs}
    for name in ("IMAGE_BYTES", "IMAGE_URL", "IMAGE_SIZES", "VIDEO_BYTES"):
        asked = {"QUERY": "Hello", "REQUEST_OUTPUT_LEN": 4, name: asking(declared[name])}
        message = error_of(server.grpc_url, "preprocessing", **asked)
        assert f"{name}: this model takes text only" in message


def test_over_http_the_error_is_one_line_too_and_others_are_answered(server: TritonServer) -> None:
    body = json.dumps({"text_input": "Hello", "max_tokens": 4, "beam_width": 2}).encode()
    url = f"{server.http_url}/v2/models/tensorrt_llm_bls/generate"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    with caught.value as answer:
        assert json.loads(answer.read())["error"].startswith("beam_width = 2: ")
    for model in ("tensorrt_llm_bls", "ensemble"):
        assert joined(server.grpc_url, model, **TEXT)
