"""Tokens by the socket of the text model, from a real engine: this process takes that model's place."""

from __future__ import annotations

import importlib
import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from pipeline.serving.server import TritonServer
from tests.serving.test_serving_cancel import IDS, LONG, cut_short, settled
from tests.support.streams import generated, stream, tensor

ASKED: dict[str, Any] = {
    "input_ids": IDS, "input_lengths": np.array([[6]], np.int32), "streaming": True,
    "request_output_len": LONG, "end_id": -1, "temperature": 3.0, "runtime_top_k": 2000, "seed": 5,
}  # fmt: skip


@pytest.fixture
def sockets(package: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module as the text model of the package has it."""
    monkeypatch.syspath_prepend(package / "model_repository/tensorrt_llm_bls/1")
    return importlib.import_module("shared.token_socket")


def test_the_last_response_completes_what_came_by_the_socket(server: TritonServer, sockets: Any) -> None:
    whole = generated(server.grpc_url, **ASKED)
    assert len(whole) == LONG
    receiver, came = sockets.TokenReceiver(), list[int]()
    with receiver.listen(came.extend) as target:
        responses = list(
            stream(server.grpc_url, "tensorrt_llm", parameters={sockets.PARAMETER: target}, **ASKED)
        )
        receiver.catch_up()
    receiver.close()
    (last,) = [response for response in responses if response.outputs]
    assert len(came) > len(last.tokens)
    assert came + last.tokens == whole


def test_a_reader_that_is_stuck_gets_all_with_the_last_response(server: TritonServer, sockets: Any) -> None:
    whole = generated(server.grpc_url, **ASKED)
    receiver, came, over = sockets.TokenReceiver(), list[int](), threading.Event()

    def stick(tokens: list[int]) -> None:
        assert over.wait(60)
        came.extend(tokens)

    with receiver.listen(stick) as target:
        (last,) = [
            response
            for response in stream(
                server.grpc_url, "tensorrt_llm", parameters={sockets.PARAMETER: target}, **ASKED
            )
            if response.outputs
        ]
        over.set()
        receiver.catch_up()
    receiver.close()
    assert last.tokens
    assert came + last.tokens == whole


def test_a_call_that_breaks_off_without_a_stop_frees_the_engine(server: TritonServer, sockets: Any) -> None:
    """As when the text model loses its connection, and cannot say that it wants no more."""
    receiver = sockets.TokenReceiver()

    def leave() -> None:
        began, ignored = threading.Event(), queue.SimpleQueue[Any]()
        with receiver.listen(lambda _: began.set()) as target:
            client = grpc.InferenceServerClient(server.grpc_url)
            client.start_stream(lambda result, error: ignored.put((result, error)))
            tensors = [tensor(name, value) for name, value in ASKED.items()]
            client.async_stream_infer("tensorrt_llm", tensors, parameters={sockets.PARAMETER: target})
            assert began.wait(30)
            client.stop_stream(cancel_requests=True)
            client.close()

    assert 1 <= cut_short(server, leave) < LONG
    receiver.close()


def test_a_text_model_that_is_gone_frees_the_engine(server: TritonServer, sockets: Any) -> None:
    """The rest of its tokens have nowhere to go; the request ends with an error instead of a hole."""

    def vanish() -> None:
        receiver, began = sockets.TokenReceiver(), threading.Event()
        answers: queue.SimpleQueue[Exception] = queue.SimpleQueue()

        def ask(target: str) -> None:
            try:
                list(stream(server.grpc_url, "tensorrt_llm", parameters={sockets.PARAMETER: target}, **ASKED))
            except InferenceServerException as error:
                answers.put(error)

        with receiver.listen(lambda _: began.set()) as target:
            asking = threading.Thread(target=ask, args=(target,))
            asking.start()
            assert began.wait(30)
            receiver.close()
        asking.join(60)
        assert "the text model that asked is gone" in str(answers.get(timeout=1))

    assert cut_short(server, vanish) < LONG


def test_a_client_cannot_choose_where_tokens_go(server: TritonServer, sockets: Any) -> None:
    """A name that is made up reaches nobody, and a text of another form is refused."""
    before = settled(server)
    for target, message in (("/tmp/socket", "is for the text model"), (f"{'0' * 32}:{'0' * 15}", "is gone")):
        with pytest.raises(InferenceServerException, match=message):
            list(stream(server.grpc_url, "tensorrt_llm", parameters={sockets.PARAMETER: target}, **ASKED))
    assert settled(server) - before < LONG
