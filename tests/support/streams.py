"""Streams from a real server with tritonclient alone, so that what a test sees is what any client would see."""

from __future__ import annotations

import queue
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient import grpc
from tritonclient.utils import np_to_triton_dtype


@dataclass(frozen=True)
class Response:
    """One response of a stream."""

    outputs: Mapping[str, np.ndarray[Any, Any]]
    final: bool

    @property
    def text(self) -> str:
        return (
            str(self.outputs["text_output"].reshape(-1)[0].decode()) if "text_output" in self.outputs else ""
        )

    @property
    def tokens(self) -> list[int]:
        return self.outputs["output_ids"].reshape(-1).tolist() if "output_ids" in self.outputs else []


def tensor(name: str, value: Any) -> grpc.InferInput:
    """A Python value as a batch of one: text, texts, a number, a flag; an array as it is."""
    if isinstance(value, np.ndarray):
        array = value
    elif isinstance(value, str):
        array = np.array([[value.encode()]], np.object_)
    elif isinstance(value, list):
        array = np.array([[item.encode() for item in value]], np.object_)
    elif isinstance(value, bool):
        array = np.array([[value]])
    elif isinstance(value, float):
        array = np.array([[value]], np.float32)
    else:
        array = np.array([[value]], np.uint64 if name == "seed" else np.int32)
    made = grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def stream(
    url: str,
    model: str,
    *,
    leave_after: int = 0,
    request_id: str = "",
    wanted: Sequence[str] = (),
    parameters: Mapping[str, str] | None = None,
    **inputs: Any,
) -> Iterator[Response]:
    """The responses to one request; with `leave_after`, the client goes after so many.

    `wanted`: the outputs that are asked for; none asks for all. `parameters`: of the request, beside its inputs.

    Raises:
        InferenceServerException: the server answered with an error.
    """
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = grpc.InferenceServerClient(url)
    count, over = 0, False
    try:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        tensors = [tensor(name, value) for name, value in inputs.items()]
        client.async_stream_infer(
            model,
            tensors,
            outputs=[grpc.InferRequestedOutput(name) for name in wanted] or None,
            request_id=request_id,
            enable_empty_final_response=True,
            parameters=parameters,
        )
        while True:
            result, error = arrived.get(timeout=60)
            over = error is not None
            if over:
                raise error
            message = result.get_response()
            outputs = {output.name: result.as_numpy(output.name) for output in message.outputs}
            response = Response(outputs, message.parameters["triton_final_response"].bool_param)
            over = response.final
            yield response
            count += 1
            if over or count == leave_after:
                return
    finally:
        client.stop_stream(cancel_requests=not over)  # see pipeline.serving.health
        client.close()


def joined(url: str, model: str, **inputs: Any) -> str:
    """The text of all responses."""
    return "".join(response.text for response in stream(url, model, **inputs))


def infer(url: str, model: str, request_id: str = "", **inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of a call of a model that gives one response."""
    with grpc.InferenceServerClient(url) as client:
        result = client.infer(model, [tensor(*value) for value in inputs.items()], request_id=request_id)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def generated(url: str, **inputs: Any) -> list[int]:
    """The tokens of all responses of `tensorrt_llm`."""
    return [id for response in stream(url, "tensorrt_llm", **inputs) for id in response.tokens]


def metrics(url: str) -> dict[str, float]:
    """Triton's metrics page: 'name{labels}' -> value."""
    with urllib.request.urlopen(url, timeout=5) as page:
        lines = page.read().decode().splitlines()
    matches = (re.fullmatch(r"(\S+?(?:\{.*\})?) (\S+)", line) for line in lines if not line.startswith("#"))
    return {match[1]: float(match[2]) for match in matches if match}
