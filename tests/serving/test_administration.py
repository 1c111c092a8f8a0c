"""Nobody can administer a running server, over HTTP or gRPC: its models are fixed at the start."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import grpc
import hpack
import pytest
from google.protobuf.message_factory import GetMessageClass
from tritonclient import grpc as triton
from tritonclient.grpc import service_pb2

from pipeline.serving.server import TritonServer

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
INFERENCE = {
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer",
    "ModelConfig", "ModelStatistics",
}  # fmt: skip
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4  # kinds of HTTP/2 frames, RFC 9113
END_STREAM, END_HEADERS = 1, 4
# https://docs.nvidia.com/deeplearning/triton-inference-server/, "HTTP/REST and GRPC Protocol": each extension's page
HEADER, VALUE = "disabled:", "disabled"  # as every user of the machine reads it on the command line
ENDPOINTS = (
    "repository/index",
    "repository/models/drill/load",
    "repository/models/tensorrt_llm/load",
    "repository/models/tensorrt_llm/unload",
    "repository/models/ensemble/unload",
    *(
        f"{kind}sharedmemory/{what}"
        for kind in ("system", "cuda")
        for what in (
            "status", "unregister", "region/drill/status", "region/drill/register", "region/drill/unregister"
        )
    ),
    "trace/setting",
    "models/tensorrt_llm/trace/setting",
    "logging",
)  # fmt: skip


def http_status(server: TritonServer, method: str, path: str, body: bytes = b"", **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=20)
    try:
        connection.request(method, f"/v2/{path}".removesuffix("/"), body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def drill(leaves: Path) -> tuple[str, bytes]:
    """The config and the source of a model that leaves a file if it is ever loaded."""
    source = (
        "import pathlib\n"
        f"pathlib.Path({str(leaves)!r}).touch()\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        return []\n"
    )
    tensor = {"data_type": "TYPE_INT32", "dims": [1]}
    config = {"backend": "python", "input": [{"name": "I", **tensor}], "output": [{"name": "O", **tensor}]}
    return json.dumps(config), source.encode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json"}, 403),
        ({}, 403),
    ],
)
def test_http_loads_no_code(
    server: TritonServer, tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    """As a web page could send it: text/plain needs no consent of the server, and any Host may resolve to it."""
    config, source = drill(tmp_path / "ran")
    parameters = {"config": config, "file:1/model.py": base64.b64encode(source).decode()}
    body = json.dumps({"parameters": parameters}).encode()
    assert http_status(server, "POST", "repository/models/drill/load", body, **headers) == status
    assert not (tmp_path / "ran").exists()


def test_grpc_loads_no_code(server: TritonServer, tmp_path: Path) -> None:
    config, source = drill(tmp_path / "ran")
    with triton.InferenceServerClient(server.grpc_url) as client:
        with pytest.raises(triton.InferenceServerException, match="This protocol is restricted"):
            client.load_model("drill", config=config, files={"file:1/model.py": source})
        assert not client.is_model_ready("drill")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_http_refuses_administration(server: TritonServer, endpoint: str) -> None:
    for body in (b"", b"{}", b'{"log_verbose_level": 9, "key": "/x", "offset": 0, "byte_size": 8}'):
        for method in ("GET", "POST"):
            assert http_status(server, method, endpoint, body) == 403, (method, body)


def test_grpc_refuses_every_call_but_those_of_inference(server: TritonServer) -> None:
    """Asks for all that the protocol has: a call that is neither for inference nor refused fails the test."""
    administrative = [method for method in SERVICE.methods if method.name not in INFERENCE]
    assert len(administrative) + len(INFERENCE) == len(SERVICE.methods)
    with grpc.insecure_channel(server.grpc_url) as channel:
        for method in administrative:
            call = channel.unary_unary(
                f"/{SERVICE.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            with pytest.raises(grpc.RpcError, match="This protocol is restricted"):
                call(GetMessageClass(method.input_type)(), timeout=20)


@pytest.mark.parametrize(
    "line", [f"{HEADER} {VALUE}", f"{HEADER}: {VALUE}", f"disabled: {VALUE}", f"disabled: : {VALUE}"]
)
def test_no_http_header_opens_it(server: TritonServer, line: str) -> None:
    request = f"POST /v2/repository/index HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n{line}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.ports.http), 20) as connection:
        connection.sendall(request.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 403 ")


def test_no_grpc_header_opens_it(server: TritonServer) -> None:
    """Written frame by frame, for no gRPC library sends such a name."""
    refusal = list(frames(server, HEADER, VALUE))
    assert [kind for kind, _ in refusal if kind in (DATA, RST_STREAM)] == [RST_STREAM]
    plain = b"".join(content for kind, content in frames(server, "other", VALUE) if kind == HEADERS)
    assert ("grpc-status", "14") in hpack.Decoder().decode(plain)


def frames(server: TritonServer, name: str, value: str) -> Iterator[tuple[int, bytes]]:
    """What RepositoryIndex is answered with if the request bears this header: kind and content of HTTP/2 frames."""
    fields = hpack.Encoder().encode(
        [
            (":method", "POST"), (":scheme", "http"), (":authority", "localhost"),
            (":path", f"/{SERVICE.full_name}/RepositoryIndex"), ("te", "trailers"),
            ("content-type", "application/grpc"), (f"triton-grpc-protocol-{name}", value),
        ]
    )  # fmt: skip
    with socket.create_connection(("127.0.0.1", server.ports.grpc), 20) as connection:
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(SETTINGS, 0, 0, b"")
            + frame(HEADERS, END_HEADERS, 1, fields)
            + frame(DATA, END_STREAM, 1, bytes(5))
        )
        with connection.makefile("rb") as stream:
            while head := stream.read(9):
                length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                content = stream.read(length)
                yield kind, content
                if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                    return


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


def test_what_clients_need_stays_open(server: TritonServer) -> None:
    model = f"models/{server.entry_model}"
    for path in (
        "health/live",
        "health/ready",
        "",
        model,
        f"{model}/ready",
        f"{model}/config",
        f"{model}/stats",
    ):
        assert http_status(server, "GET", path) == 200, path
    with triton.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata().name == "triton"
        assert client.get_model_metadata(server.entry_model).name == server.entry_model
        assert client.get_model_config(server.entry_model).config.name == server.entry_model
        assert client.get_inference_statistics(server.entry_model).model_stats
        assert all(client.is_model_ready(model) for model in server.deployment.models)
    assert server.check_health().text is not None
