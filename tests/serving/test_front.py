"""What others reach of Triton: requests that end it are refused, and it goes on; no port is open that nobody opened."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tritonclient import grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from pipeline.client import Client
from pipeline.machine.processes import listening
from pipeline.process_state import ProcessStat
from pipeline.serving.ports import Ports
from pipeline.serving.probe import is_ready
from pipeline.serving.server import TritonServer
from tests.serving.test_serving_cancel import ENDLESS, LONG, PROMPT, cut_short
from tests.support.served import SETTINGS, front_pid, package_support_pair
from tests.support.streams import joined
from tests.support.streams import tensor as sent
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers

MODEL = "/v2/models/tensorrt_llm_bls"
BOMB = b"[" * 3_000_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One response a request, so that HTTP's infer works."""
    folder = tmp_path_factory.mktemp("whole")
    made = package_support_pair(folder, settings=replace(SETTINGS, decoupled=False))
    with TritonServer.of_package(made, ports=Ports.free(http=True), log_file=folder / "log") as server:
        yield server


def ask(
    server: TritonServer, path: str, body: bytes = b"", *, chunks: int = 0, **headers: str
) -> tuple[int, dict[str, Any]]:
    """POST a body: in one piece, or chunked in as many."""
    assert server.ports.http is not None
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        # Who is refused may find the connection closed while it sends.
        try:
            if chunks:
                size = -(-len(body) // chunks)
                pieces = (body[begin : begin + size] for begin in range(0, len(body), size))
                connection.request("POST", path, pieces, named, encode_chunked=True)
            else:
                connection.request("POST", path, body, named)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def tensors(**changes: Any) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["Hello"]},
            {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [4], **changes},
        ]
    }


JSON = {"Content_Type": "application/json"}
HARMFUL = {
    "deep": (BOMB, 400, JSON),
    "deep without a type": (BOMB, 400, {}),
    "deep objects": (b'{"a":' * 600_000, 400, JSON),
    "a large shape": (json.dumps(tensors(shape=[1, 1 << 40])).encode(), 400, JSON),
    "classes": (
        json.dumps(
            tensors() | {"outputs": [{"name": "text_output", "parameters": {"classification": 1 << 40}}]}
        ).encode(),
        400,
        JSON,
    ),
    "compressed": (gzip.compress(bytes(10**6)), 415, JSON | {"Content_Encoding": "gzip"}),
    "a form": (b"x=1", 415, {"Content_Type": "application/x-www-form-urlencoded"}),
    "a huge length": (b"{}", 400, JSON | {"Inference_Header_Content_Length": "99999999999999999999"}),
    "a negative length": (b"{}", 400, JSON | {"Inference_Header_Content_Length": "-1"}),
    "too large a length": (b"{}", 400, JSON | {"Inference_Header_Content_Length": "3"}),
    "too much": (b"{}", 413, JSON | {"Content_Length": str(2**30)}),
    "too much JSON": (b'{"text_input":"' + b"x" * 9_000_000, 413, JSON),
}


# The header belongs to infer, and generate takes no tensors.
_OF_INFER = {"a large shape", "classes", *(name for name in HARMFUL if name.endswith("length"))}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (name, call)
        for name in HARMFUL
        for call in ("infer", "generate")
        if call == "infer" or name not in _OF_INFER
    ],
)
def test_what_ends_triton_is_refused(whole: TritonServer, name: str, call: str) -> None:
    body, status, headers = HARMFUL[name]
    found, answer = ask(whole, f"{MODEL}/{call}", body, **headers)
    assert found == status
    assert isinstance(answer["error"], str)
    assert whole.check_health().text is not None


def test_a_body_in_many_chunks_goes_on_in_one(whole: TritonServer) -> None:
    """By itself, Triton 24.10 ends at 700,000 chunks."""
    body = json.dumps(tensors()).encode()
    text = ask(whole, f"{MODEL}/infer", body, **JSON)[1]["outputs"][0]["data"]
    assert (
        ask(whole, f"{MODEL}/infer", body + b" " * 300_000, chunks=100_000, **JSON)[1]["outputs"][0]["data"]
        == text
    )


def test_binary_tensors_pass_unchanged(whole: TritonServer) -> None:
    """With spaces in the JSON before them, which is written anew, and so has another length."""
    prompt, expected = PROMPT.encode(), None
    for space in ("", " ", "\n   "):
        head = tensors()
        value = len(prompt).to_bytes(4, "little") + prompt
        del head["inputs"][0]["data"]
        head["inputs"][0]["parameters"] = {"binary_data_size": len(value)}
        text = json.dumps(head).replace(" ", space).encode()
        length = {"Inference_Header_Content_Length": str(len(text))}
        status, answer = ask(whole, f"{MODEL}/infer", text + value, **length)
        assert status == 200
        expected = expected or answer["outputs"][0]["data"]
        assert answer["outputs"][0]["data"] == expected
    assert expected == [joined(whole.target, "tensorrt_llm_bls", text_input=PROMPT, max_tokens=4)]


def test_a_client_that_leaves_an_http_stream_frees_the_engine(server: TritonServer) -> None:
    assert server.ports.http is not None
    body = json.dumps({"text_input": PROMPT, "max_tokens": LONG, "stream": True, **ENDLESS}).encode()

    def leave() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.ports.http or 0, timeout=20)
        connection.request("POST", f"{MODEL}/generate_stream", body, {"Content-Type": "application/json"})
        connection.getresponse().read(200)
        connection.close()

    assert cut_short(server, leave) < LONG


def class_request() -> pb.ModelInferRequest:
    asked = pb.ModelInferRequest(model_name="tensorrt_llm_bls")
    for name, kind, value in (("text_input", "BYTES", b"\2\0\0\0hi"), ("max_tokens", "INT32", b"\2\0\0\0")):
        asked.inputs.add(name=name, datatype=kind, shape=[1, 1])
        asked.raw_input_contents.append(value)
    asked.outputs.add(name="text_output").parameters["classification"].int64_param = 1 << 40
    return asked


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_grpc_messages_that_end_triton_are_refused(
    whole: TritonServer, method: str, compression: grpc.Compression
) -> None:
    path, of = f"/inference.GRPCInferenceService/{method}", pb.ModelInferRequest.SerializeToString
    with grpc.insecure_channel(whole.grpc_url, compression=compression) as channel:
        calls = {
            "ModelInfer": lambda: channel.unary_unary(path, of)(class_request(), timeout=30),
            "ModelStreamInfer": lambda: list(
                channel.stream_stream(path, of)(iter([class_request()]), timeout=30)
            ),
        }
        with pytest.raises(grpc.RpcError) as caught:
            calls[method]()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert whole.check_health().text is not None


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_large_message_takes_no_memory_of_triton(whole: TritonServer, compression: str | None) -> None:
    """200 MB; in Triton itself 500 MB took 1.3 GB, and half a megabyte compressed as much."""
    stats = {pid: ProcessStat.of(pid) for pid in whole.pids}
    process = psutil.Process(next(pid for pid, stat in stats.items() if stat and stat.name == "tritonserver"))
    before = process.memory_info().rss
    tensor = triton.InferInput("text_input", [1, 200 * 10**6], "UINT8")
    tensor.set_data_from_numpy(np.zeros((1, 200 * 10**6), np.uint8))
    with triton.InferenceServerClient(whole.grpc_url) as client, pytest.raises(InferenceServerException):
        client.infer("tensorrt_llm_bls", [tensor], compression_algorithm=compression)
    assert process.memory_info().rss < before + 150 * 2**20
    with triton.InferenceServerClient(whole.grpc_url) as client:
        small = [sent("text_input", "Hello"), sent("max_tokens", 3)]
        answer = client.infer("tensorrt_llm_bls", small, compression_algorithm=compression)
        assert answer.as_numpy("text_output").size


def test_nothing_listens_but_what_was_opened(package: Path, tmp_path: Path) -> None:
    """Without ports, only the page of metrics; gRPC is a socket that its user alone can reach."""
    with TritonServer.of_package(package, log_file=tmp_path / "log") as server:
        assert set().union(*map(listening, server.pids)) == {server.ports.metrics}
        path = Path(server.target.removeprefix("unix:"))
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert server.http_url == ""
        with Client(server.grpc_url) as client:
            assert client.generate("Hello", max_tokens=3).text
    assert not path.parent.exists() or not any(path.parent.iterdir())


def test_the_front_is_started_again_and_streams_of_the_own_user_do_not_notice(
    package: Path, tmp_path: Path
) -> None:
    with TritonServer.of_package(package, ports=Ports.free(http=True), log_file=tmp_path / "log") as server:
        first = front_pid(server)
        with Client(server.target) as client, client.stream("Hello", max_tokens=100) as answer:
            next(iter(answer))
            os.kill(first, signal.SIGKILL)
            assert sum(1 for _ in answer) > 10
        wait_for(lambda: server.keep_ports_open() and front_pid(server) not in (0, first), "another front")
        wait_for(lambda: is_ready(server.grpc_url, timeout_s=2), "its port")
        assert ask(server, f"{MODEL}/generate", b"[", **JSON)[0] == 400


def test_many_idle_connections_leave_room_for_the_own_user(server: TritonServer) -> None:
    assert server.ports.grpc is not None
    held = [socket.create_connection(("127.0.0.1", server.ports.grpc), 5) for _ in range(600)]
    try:
        time.sleep(0.2)
        assert server.check_health().text is not None
    finally:
        for request in held:
            request.close()
    wait_for(lambda: is_ready(server.grpc_url, timeout_s=2), "places for others")
