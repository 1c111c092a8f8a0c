"""Whether a server really answers: one short generation through the model that clients use.

Triton's own /v2/health/ready stays at 200 when the process of a Python model is dead, so it says too little. This is
no client for applications; `pipeline.client` is, and it tells here which tensors a model has.

    python -m pipeline.serving.health      exit 0 if the ready file is there and a generation comes back, else 1

The ready file says that a container is ready: it is there after the warm-up, and gone while the server is ill or ends.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from pipeline.client.tensors import ModelSignature, read_signature
from pipeline.errors import ServerError


@dataclass(frozen=True, slots=True)
class ProbeGeneration:
    """A complete answer of the server, with the seconds that it took."""

    text: str
    first_s: float  # until the first response
    total_s: float


def generate(grpc_url: str, model: str, prompt: str, *, max_tokens: int, timeout_s: float) -> ProbeGeneration:
    """Stream one greedy answer from a model that takes text: `ensemble`, `tensorrt_llm_bls`, or the LLM API's own.

    Args:
        grpc_url: host:port of the server.
        model: Name of the model.
        prompt: Text to continue.
        max_tokens: Tokens of the answer, at most.
        timeout_s: Time for the whole answer.

    Raises:
        ServerError: There was no answer within the time, or an error came instead.
    """
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = grpc.InferenceServerClient(grpc_url)
    start = time.monotonic()
    first = None
    text: list[str] = []
    over = False
    try:
        facts = read_signature(client.get_model_config(model, client_timeout=timeout_s).config)
        client.start_stream(lambda result, error: arrived.put((result, error)), stream_timeout=timeout_s)
        client.async_stream_infer(model, _inputs(facts, prompt, max_tokens), enable_empty_final_response=True)
        while True:
            result, error = arrived.get(timeout=max(0.0, start + timeout_s - time.monotonic()))
            over = error is not None
            if over:
                raise ServerError(f"{model} does not answer: {error}")
            first = first or time.monotonic()
            piece = result.as_numpy("text_output")
            if piece is not None:
                said = piece.reshape(-1)[0].decode("utf-8", errors="replace")
                text = [said] if facts.cumulative else [*text, said]
            final = result.get_response().parameters["triton_final_response"].bool_param
            over = final or not facts.decoupled
            if over:
                return ProbeGeneration("".join(text), first - start, time.monotonic() - start)
    except queue.Empty:
        raise ServerError(f"{model} gave no answer within {timeout_s:g} s") from None
    except InferenceServerException as error:
        raise ServerError(f"{model} does not answer: {error}") from None
    finally:
        # Cancelled as it ends, a request can stay in Triton 24.10 for good, and then its model is never unloaded.
        client.stop_stream(cancel_requests=not over)
        client.close()


# By role, what the layouts call it: the TensorRT-LLM backend's models, the `llmapi` model.
_NAMES = {
    "prompt": ("text_input",),
    "max_tokens": ("max_tokens", "sampling_param_max_tokens"),
    "stream": ("stream", "streaming"),
    "exclude_input": ("exclude_input_in_output", "sampling_param_exclude_input_from_output"),
}
_DATA_TYPES = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}


def _inputs(facts: ModelSignature, prompt: str, max_tokens: int) -> list[Any]:
    from tritonclient import grpc

    values = {
        "prompt": prompt.encode(),
        "max_tokens": max_tokens,
        "stream": facts.decoupled,
        "exclude_input": True,
    }
    inputs = []
    for role, value in values.items():
        name = facts.input_named(_NAMES[role])
        if name is None:
            continue
        datatype = facts.inputs[name].datatype
        array = np.array([[value]] if facts.batched else [value], _DATA_TYPES[datatype])
        tensor = grpc.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


FILE_VARIABLE, DEFAULT_FILE = "PIPELINE_READY_FILE", "/tmp/pipeline/ready.json"
_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Ready:
    """What is needed to ask the server."""

    grpc_url: str
    entry_model: str
    confirmed: (
        float  # when the supervisor last found it so, by the clock that all processes share (CLOCK_MONOTONIC)
    )

    @classmethod
    def now(cls, grpc_url: str, entry_model: str) -> Self:
        """What is true at this moment."""
        return cls(grpc_url, entry_model, time.monotonic())

    def write(self, file: Path) -> None:
        """Make the file, at once and whole."""
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        draft.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        draft.replace(file)


def ready_file() -> Path:
    """Where the file lies."""
    return Path(os.environ.get(FILE_VARIABLE) or DEFAULT_FILE)


def main() -> int:
    """Ask the server; the exit code."""
    try:
        ready = Ready(**json.loads(ready_file().read_text(encoding="utf-8")))
    except FileNotFoundError:
        print("not ready: it starts, is ill, or ends", file=sys.stderr)
        return 1
    try:
        answer = generate(ready.grpc_url, ready.entry_model, "Hello", max_tokens=1, timeout_s=_DEADLINE_S)
    except ServerError as error:
        print(f"ill: {error}", file=sys.stderr)
        return 1
    print(f"ready: a first token after {answer.first_s * 1000:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
