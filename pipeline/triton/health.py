"""Whether a server really answers: one short generation through the model that clients use.

Triton's own /v2/health/ready stays at 200 when the process of a Python model is dead, so it says too little. This is
no client for applications; `pipeline.client` is.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import ServerError


@dataclass(frozen=True, slots=True)
class Answer:
    """What a generation gave."""

    text: str
    first_s: float  # until the first response
    total_s: float


def generate(grpc_url: str, model: str, prompt: str, *, max_tokens: int, timeout_s: float) -> Answer:
    """Stream one greedy answer from a model that takes text.

    Raises:
        ServerError: there was none within the time, or an error came instead.
    """
    from tritonclient import grpc

    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = grpc.InferenceServerClient(grpc_url)
    start = time.monotonic()
    first = None
    text = []
    try:
        client.start_stream(lambda result, error: arrived.put((result, error)), stream_timeout=timeout_s)
        client.async_stream_infer(model, _inputs(prompt, max_tokens), enable_empty_final_response=True)
        while True:
            result, error = arrived.get(timeout=max(0.0, start + timeout_s - time.monotonic()))
            if error is not None:
                raise ServerError(f"{model} does not answer: {error}")
            first = first or time.monotonic()
            piece = result.as_numpy("text_output")
            if piece is not None:
                text.append(piece.reshape(-1)[0].decode("utf-8", errors="replace"))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return Answer("".join(text), first - start, time.monotonic() - start)
    except queue.Empty:
        raise ServerError(f"{model} gave no answer within {timeout_s:g} s") from None
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


def _inputs(prompt: str, max_tokens: int) -> list[Any]:
    from tritonclient import grpc

    values = {
        "text_input": np.array([[prompt.encode()]], np.object_),
        "max_tokens": np.array([[max_tokens]], np.int32),
        "stream": np.array([[True]]),
    }
    types = {"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL"}
    inputs = []
    for name, array in values.items():
        tensor = grpc.InferInput(name, list(array.shape), types[name])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs
