"""A deployment that is not decoupled: who does not stream gets the whole answer, side by side, over any protocol."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from tritonclient import grpc, http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from pipeline.client import AsyncClient, Client
from pipeline.gateway.app import Gateway, GatewayServer
from pipeline.gateway.tenants import Tenants
from pipeline.serving.ports import Ports
from pipeline.serving.server import TritonServer
from tests.serving.test_serving_cancel import ENDLESS, LONG, PROMPT, cut_short
from tests.support.engine import QUESTIONS, TURN
from tests.support.scripted_model import tiny
from tests.support.served import SETTINGS, package_support_pair
from tests.support.streams import infer, joined, tensor
from tests.support.waiting import wait_for

PROMPTS = [TURN.format(question) for question in QUESTIONS]
TEXT_MODELS = ["tensorrt_llm_bls", "ensemble"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """With a draft model, whose answers are those of its target alone."""
    folder = tmp_path_factory.mktemp("whole")
    settings = replace(SETTINGS, decoupled=False, max_draft_tokens=4, speculation="bls")
    made = package_support_pair(folder, draft=True, settings=settings)
    with TritonServer.of_package(made, ports=Ports.free(http=True), log_file=folder / "triton.log") as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: TritonServer) -> list[str]:
    """What the deployment that streams says."""
    return [
        joined(server.grpc_url, TEXT_MODELS[0], text_input=prompt, max_tokens=24, stream=True)
        for prompt in PROMPTS
    ]


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    return {"text_input": prompt, "max_tokens": 24, "exclude_input_in_output": True, **more}


def text(outputs: Mapping[str, np.ndarray[Any, Any]]) -> str:
    return str(outputs["text_output"][0].decode())


def request(server: TritonServer, path: str, body: dict[str, Any]) -> urllib.request.Request:
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{server.http_url}/v2/models/{path}", json.dumps(body).encode(), headers)


def post(server: TritonServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(request(server, path, body), timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_every_way_to_ask_gets_the_whole_answer(whole: TritonServer, expected: list[str], model: str) -> None:
    question, answer = asked(PROMPTS[0]), expected[0]
    assert text(infer(whole.grpc_url, model, **question)) == answer
    with http.InferenceServerClient(whole.http_url.removeprefix("http://")) as client:
        arrays = {
            "text_input": np.array([[PROMPTS[0].encode()]], np.object_),
            "max_tokens": np.array([[24]], np.int32),
            "exclude_input_in_output": np.array([[True]]),
        }
        tensors = []
        for name, array in arrays.items():
            tensors.append(http.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            tensors[-1].set_data_from_numpy(array)
        assert client.infer(model, tensors).as_numpy("text_output")[0].decode() == answer
    plain = {"text_input": "BYTES", "max_tokens": "INT32", "exclude_input_in_output": "BOOL"}
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": kind, "data": [question[name]]}
        for name, kind in plain.items()
    ]
    (output,) = (
        output
        for output in post(whole, f"{model}/infer", {"inputs": inputs})["outputs"]
        if output["name"] == "text_output"
    )
    assert (output["shape"], output["data"]) == ([1], [answer])
    assert post(whole, f"{model}/generate", question)["text_output"] == answer
    asking = request(whole, f"{model}/generate_stream", question)
    with urllib.request.urlopen(asking, timeout=60) as events:
        (event,) = (line for line in events if line.startswith(b"data: "))
    assert json.loads(event.removeprefix(b"data: "))["text_output"] == answer


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_eight_at_a_time_get_the_answers_of_one_at_a_time(
    whole: TritonServer, expected: list[str], model: str
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda prompt: text(infer(whole.grpc_url, model, **asked(prompt))), PROMPTS * 3)
        )
    assert answers == expected * 3


def test_requests_run_side_by_side(whole: TritonServer) -> None:
    """Of eight that are sent at once, the engine has at least four at the same moment, by its own clock."""
    together = threading.Barrier(8)
    question = asked(PROMPT, max_tokens=300, return_perf_metrics=True, num_draft_tokens=0, **ENDLESS)

    def span(_: int) -> tuple[int, int]:
        together.wait(30)
        result = infer(whole.grpc_url, "tensorrt_llm_bls", **question)
        names = ("first_scheduled_time_ns", "last_token_time_ns")
        first, last = (int(result[name].item()) for name in names)
        return first, last

    with ThreadPoolExecutor(8) as pool:
        spans = list(pool.map(span, range(8)))
    most = max(sum(first <= moment <= last for first, last in spans) for moment, _ in spans)
    assert most >= 4, spans


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("tensorrt_llm_bls", {"stream": True}, "stream = true: the model is not decoupled"),
        ("ensemble", {"stream": True}, "streaming = true: the model is not decoupled"),
        ("tensorrt_llm_bls", {"num_return_sequences": 2}, "num_return_sequences = 2: the model is not decoupled"),
        ("tensorrt_llm_bls", {"max_tokens": 0}, "max_tokens = [[0]]: must be 1 or more"),
    ],
    ids=["stream", "stream-ensemble", "sequences", "nothing"],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    whole: TritonServer, model: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(whole.grpc_url, model, **{**asked(PROMPT), **more})
    assert message in caught.value.message()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(urllib.error.HTTPError, match="HTTP Error 400") as answered:
        post(whole, f"{model}/generate", {**asked(PROMPT), **more})
    answered.value.close()


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_batch_is_refused(whole: TritonServer, model: str) -> None:
    prompts = np.array([[prompt.encode()] for prompt in PROMPTS[:2]], np.object_)
    with pytest.raises(
        InferenceServerException, match="has 2 prompts, must be one: the model is not decoupled"
    ):
        infer(whole.grpc_url, model, text_input=prompts, max_tokens=np.full((2, 1), 4, np.int32))


IDS = {"input_ids": np.array([[1, 3, 629, 4, 5, 6]], np.int32), "input_lengths": np.array([[6]], np.int32)}
ENDLESS_IDS = {
    **IDS, "request_output_len": LONG, "end_id": -1, "temperature": 3.0, "runtime_top_k": 2000,
}  # fmt: skip


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "tensorrt_llm"])
def test_a_call_that_is_cancelled_frees_the_engine(whole: TritonServer, model: str) -> None:
    question = asked(PROMPT, max_tokens=LONG, num_draft_tokens=0, **ENDLESS)
    if model == "tensorrt_llm":
        question = ENDLESS_IDS
    outcomes: queue.SimpleQueue[InferenceServerException | None] = queue.SimpleQueue()

    def leave() -> None:
        with grpc.InferenceServerClient(whole.grpc_url) as client:
            tensors = [tensor(name, value) for name, value in question.items()]
            call = client.async_infer(model, tensors, lambda result, error: outcomes.put(error))  # noqa: ARG005
            time.sleep(0.05)
            call.cancel()
            # None: a busy machine was done sooner.
            error = outcomes.get(timeout=60)
            assert error is None or "cancel" in str(error).lower()

    assert cut_short(whole, leave) < LONG
    assert text(infer(whole.grpc_url, "tensorrt_llm_bls", **asked(PROMPT)))


def test_a_request_that_is_stopped_answers_with_what_it_has(whole: TritonServer) -> None:
    """By its id, as TensorRT-LLM's clients stop; the request that says so gets an empty response."""
    id = "0123456789abcdef"
    lengths: list[int] = []

    def ask_and_stop() -> None:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(infer, whole.grpc_url, "tensorrt_llm", id, **ENDLESS_IDS)
            while not running.done():
                answer = infer(whole.grpc_url, "tensorrt_llm", id, **IDS, request_output_len=1, stop=True)
                assert not answer
            lengths.append(int(running.result()["sequence_length"].item()))

    assert cut_short(whole, ask_and_stop) < LONG
    assert lengths[-1] < 6 + LONG


def test_upstreams_client_for_drafts(whole: TritonServer, expected: list[str]) -> None:
    """As triton_backend/inflight_batcher_llm/client/e2e_grpc_speculative_decoding_client.py (NVIDIA/TensorRT-LLM
    @7ed07f0691df) asks in turns: preprocessing, then draft and target until the answer ends, then postprocessing."""
    most, drafts = 24, 4
    made = infer(
        whole.grpc_url,
        "preprocessing",
        QUERY=PROMPTS[0],
        REQUEST_OUTPUT_LEN=most,
        STOP_WORDS_DICT=[""],
        BAD_WORDS_DICT=[""],
    )
    prompt = np.squeeze(made["INPUT_ID"], axis=0)
    rest = {
        "stop_words_list": made["STOP_WORDS_IDS"], "bad_words_list": made["BAD_WORDS_IDS"],
        "beam_width": 1, "temperature": 1.0, "end_id": int(made["OUT_END_ID"][0][0]),
        "pad_id": int(made["OUT_PAD_ID"][0][0]),
    }  # fmt: skip

    def call(model: str, ids: np.ndarray[Any, Any], count: int, **more: Any) -> np.ndarray[Any, Any]:
        given = {"input_ids": ids[None], "input_lengths": len(ids), "request_output_len": count}
        result = infer(whole.grpc_url, model, **given, **rest, **more)
        assert result["sequence_length"].shape == (1, 1)
        return np.squeeze(result["output_ids"], axis=(0, 1))

    ids, accepted = prompt, 0
    while True:
        count = min(drafts, len(prompt) + most - len(ids) - 1)
        guess = call("tensorrt_llm_draft", ids, count)[len(ids) :] if count > 0 else []
        more = {"draft_input_ids": np.array([guess], np.int32)} if len(guess) else {}
        last, ids = ids, call("tensorrt_llm", ids, len(guess) + 1, **more)
        accepted += max(0, len(ids) - len(last) - 1)
        if len(ids) >= len(prompt) + most or len(ids) == len(last):
            break
    assert accepted
    lengths = np.array([[len(ids)]], np.int32)
    output = infer(whole.grpc_url, "postprocessing", TOKENS_BATCH=ids[None, None], SEQUENCE_LENGTH=lengths)[
        "OUTPUT"
    ]
    assert output[0].decode("utf8").endswith(expected[0])


def test_our_clients_get_one_chunk(whole: TritonServer, expected: list[str]) -> None:
    with Client(whole.grpc_url) as client, client.stream(PROMPTS[0], max_tokens=24) as stream:
        (chunk,) = stream
        assert (chunk.text, chunk.finish_reason) == (expected[0], stream.finish_reason)
        assert stream.stats.output_tokens == 24 or stream.finish_reason == "stop"

    async def ask() -> list[str]:
        async with AsyncClient(whole.grpc_url) as client:
            answers = await asyncio.gather(*(client.generate(prompt, max_tokens=24) for prompt in PROMPTS))
            return [answer.text for answer in answers]

    assert asyncio.run(ask()) == expected


def test_the_gateway_streams_it_as_one_chunk(whole: TritonServer, expected: list[str]) -> None:
    served = tiny(whole.grpc_url, template=None)
    server = GatewayServer(
        Gateway({"tiny": served}, Tenants(), max_body_bytes=10_000), "127.0.0.1", 0, drain_s=2
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started, "the gateway")
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            question = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 24}
            assert client.completions.create(**question).choices[0].text == expected[0]
            streamed = list(client.completions.create(**question, stream=True))
            assert [chunk.choices[0].text for chunk in streamed if chunk.choices[0].text] == [expected[0]]
            several = client.completions.create(**question, n=2).choices
            assert [choice.text for choice in several] == [expected[0]] * 2
    finally:
        server.should_exit = True
        thread.join(10)
