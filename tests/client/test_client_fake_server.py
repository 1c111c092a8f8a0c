"""The fake server is one to tritonclient too, and refuses in Triton's words."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from pipeline.client.testing import Ending, FakeServer, Received, Reply, bls

MODEL = "tensorrt_llm_bls"


def inputs(**tensors: tuple[str, Any]) -> list[triton.InferInput]:
    made = []
    for name, (datatype, value) in {
        "text_input": ("BYTES", "Hi"),
        "max_tokens": ("INT32", 4),
        **tensors,
    }.items():
        dtype = {"BYTES": object, "INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32}[datatype]
        tensor = triton.InferInput(name, [1, 1], datatype)
        tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
        made.append(tensor)
    return made


def stream(client: triton.InferenceServerClient, **tensors: tuple[str, Any]) -> tuple[list[bytes], list[str]]:
    """Texts and errors of one request, as tritonclient gets them."""
    results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    client.async_stream_infer(MODEL, inputs(**tensors), request_id="r1", enable_empty_final_response=True)
    texts, errors = [], []
    while True:
        result, error = results.get(timeout=10)
        if error is not None:
            errors.append(error.message())
            break
        response = result.get_response()
        if response.outputs:
            texts.append(result.as_numpy("text_output").item())
        if response.parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    return texts, errors


def test_tritonclient_streams_from_it() -> None:
    with FakeServer() as server, triton.InferenceServerClient(server.url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready(MODEL)
        assert not client.is_model_ready("nope")
        assert client.get_model_metadata(MODEL).inputs[0].datatype == "BYTES"
        assert client.get_model_config(MODEL).config.max_batch_size == 8
        assert stream(client) == ([b"Hello", b" world"], [])
        assert server.requests[0].tensors == {"text_input": ["Hi"], "max_tokens": [4]}
        assert server.requests[0].finished.wait(5)


def test_an_error_without_the_header_comes_as_a_message() -> None:
    with FakeServer(Reply(ending=Ending.ERROR)) as server, triton.InferenceServerClient(server.url) as client:
        assert stream(client) == ([b"Hello", b" world"], ["the model failed"])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"bogus": ("INT32", 1)}, "unexpected inference input 'bogus' for model 'tensorrt_llm_bls'"),
        (
            {"stream": ("INT32", 1)},
            "inference input 'stream' data-type is 'INT32', but model 'tensorrt_llm_bls' expects 'BOOL'",
        ),
    ],
)
def test_admission(tensors: dict[str, tuple[str, Any]], message: str) -> None:
    with FakeServer() as server, triton.InferenceServerClient(server.url) as client:
        texts, errors = stream(client, **tensors)
        assert texts == []
        assert message in errors[0]
        assert server.requests == []


def test_answers_at_once_when_not_decoupled() -> None:
    with FakeServer(model=bls(decoupled=False)) as server, triton.InferenceServerClient(server.url) as client:
        assert client.infer(MODEL, inputs()).as_numpy("text_output").item() == b"Hello world"


def test_a_decoupled_model_has_no_single_response() -> None:
    refused = pytest.raises(InferenceServerException, match="decoupled transaction policy")
    with FakeServer() as server, triton.InferenceServerClient(server.url) as client, refused:
        client.infer(MODEL, inputs())


def test_replies_in_turn_and_by_function() -> None:
    with (
        FakeServer([Reply(["a"]), Reply(["b"])]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        assert [stream(client)[0] for _ in range(3)] == [[b"a"], [b"b"], [b"a"]]

    def echo(received: Received) -> Reply:
        return Reply([received.prompt])

    with FakeServer(echo) as server, triton.InferenceServerClient(server.url) as client:
        assert stream(client, text_input=("BYTES", "again")) == ([b"again"], [])
