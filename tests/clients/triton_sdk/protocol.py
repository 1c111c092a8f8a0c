"""Health, metadata and bad input, as tritonclient's four clients see them: prints what each call returned or raised."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

HTTP, GRPC = os.environ["TRITON_HTTP"], os.environ["TRITON_GRPC"]
CLIENTS = {
    "grpc": (tritonclient.grpc, tritonclient.grpc.InferenceServerClient(GRPC)),
    "http": (tritonclient.http, tritonclient.http.InferenceServerClient(HTTP)),
}
PROMPT, MODEL = sys.argv[1], "tensorrt_llm_bls"
FAULTS: dict[str, dict[str, Any]] = {
    "wrong dtype": {"max_tokens": np.array([[8]], np.int64)},
    "missing input": {"max_tokens": None},
    "unknown input": {"max_new_tokens": np.array([[8]], np.int32)},
    "wrong shape": {"max_tokens": np.array([8], np.int32)},
    "long prompt": {"text_input": np.array([["word " * 3000]], object)},
    "too many tokens": {"max_tokens": np.array([[100_000]], np.int32)},
}


def tensors(module: Any, **changed: Any) -> list[Any]:
    """Of a request, with `changed` inputs; None leaves one out."""
    arrays = {
        "text_input": np.array([[PROMPT]], object),
        "max_tokens": np.array([[8]], np.int32),
        "exclude_input_in_output": np.array([[True]]),
    }
    made = []
    for name, array in (arrays | changed).items():
        if array is not None:
            made.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            made[-1].set_data_from_numpy(array)
    return made


def text(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


def stream(inputs: list[Any], headers: dict[str, str] | None = None) -> str:
    """The joined text of a stream. Raises the error that came in it."""
    arrived: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(GRPC) as client:
        client.start_stream(lambda result, error: arrived.put(error or result), headers=headers)
        client.async_stream_infer(MODEL, inputs)
        client.stop_stream()
    results = [arrived.get() for _ in range(arrived.qsize())]
    for result in results:
        if isinstance(result, Exception):
            raise result
    return "".join(map(text, results))


async def of_asyncio(name: str, inputs: list[Any]) -> str:
    """The answer, by infer() of an asyncio client."""
    made = {"grpc": tritonclient.grpc.aio, "http": tritonclient.http.aio}[name]
    async with made.InferenceServerClient({"grpc": GRPC, "http": HTTP}[name]) as client:
        return text(await client.infer(MODEL, inputs))


async def streamed_by_asyncio(inputs: list[Any]) -> str:
    """The joined text of a stream of the asyncio client."""

    async def requests() -> Any:
        yield {"model_name": MODEL, "inputs": inputs}

    pieces = []
    async with tritonclient.grpc.aio.InferenceServerClient(GRPC) as client:
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                raise error
            pieces.append(text(result))
    return "".join(pieces)


def outcome(call: Any) -> Any:
    """What a call returns, or [status, message] of what it raises."""
    try:
        found = call()
        return asyncio.run(found) if inspect.iscoroutine(found) else found
    except InferenceServerException as error:
        return [error.status(), error.message()]


WAYS = {
    "grpc infer": lambda **more: CLIENTS["grpc"][1].infer(MODEL, tensors(tritonclient.grpc, **more)),
    "http infer": lambda **more: CLIENTS["http"][1].infer(MODEL, tensors(tritonclient.http, **more)),
    "grpc stream": lambda **more: stream(tensors(tritonclient.grpc, **more)),
    "grpc stream with codes": lambda **more: stream(
        tensors(tritonclient.grpc, **more), {"triton_grpc_error": "true"}
    ),
    "asyncio grpc infer": lambda **more: of_asyncio("grpc", tensors(tritonclient.grpc, **more)),
    "asyncio http infer": lambda **more: of_asyncio("http", tensors(tritonclient.http, **more)),
    "asyncio grpc stream": lambda **more: streamed_by_asyncio(tensors(tritonclient.grpc, **more)),
}


def answer(way: str, **more: Any) -> Any:
    found = outcome(lambda: WAYS[way](**more))
    return found if isinstance(found, str | list) else text(found)


def seen(name: str) -> dict[str, Any]:
    """Health and metadata, by a blocking client."""
    client = CLIENTS[name][1]
    as_json = {"as_json": True} if name == "grpc" else {}
    config = client.get_model_config(MODEL, **as_json)
    metadata = client.get_model_metadata(MODEL, **as_json)
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model": client.is_model_ready(MODEL),
        "ensemble": client.is_model_ready("ensemble", "1"),
        "unknown": client.is_model_ready("unknown"),
        "required": [
            tensor["name"] for tensor in config.get("config", config)["input"] if not tensor.get("optional")
        ],
        "outputs": [output["name"] for output in metadata["outputs"]][:1],
        "decoupled": bool(config.get("config", config).get("model_transaction_policy", {}).get("decoupled")),
        "answers": outcome(lambda: client.get_inference_statistics(MODEL, **as_json))["model_stats"][0][
            "name"
        ],
        "unknown model": outcome(lambda: client.get_model_metadata("unknown")),
        "index": outcome(client.get_model_repository_index),
        "load": outcome(lambda: client.load_model(MODEL)),
    }


SEEN = {name: seen(name) for name in CLIENTS}
if SEEN["grpc"]["decoupled"]:
    # Triton 24.10 may crash when a decoupled model sends its end after an error that has closed the stream.
    del WAYS["grpc stream with codes"]
print(
    json.dumps(
        {
            "seen": SEEN,
            "answers": {way: answer(way) for way in WAYS},
            "faults": {
                way: {fault: answer(way, **inputs) for fault, inputs in FAULTS.items()} for way in WAYS
            },
        }
    )
)
