"""TensorRT-LLM's own clients against a deployment: upstream's file where there is one, else the requests that it sends.

Written after triton_backend/inflight_batcher_llm/client/end_to_end_grpc_client.py (NVIDIA/TensorRT-LLM @2a9abd9536aa):
the same tensors in the same shapes, and the same indexes of what comes back. Containers with TensorRT-LLM have the
clients in `contracts.launching.upstream_clients()`.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import ServerError

END_TO_END = "end_to_end_grpc_client.py"
PERFORMANCE = (
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns",
    "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "acceptance_rate",
    "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip
_TIMEOUT_S = 300.0


def run_upstream_client(
    file: Path, url: str, model: str, prompt: str, expected: str, *, max_tokens: int, streaming: bool
) -> str:
    """Run upstream's end-to-end client, and let it compare the answer.

    Args:
        model: `ensemble` or `tensorrt_llm_bls`.
        expected: The greedy answer.

    Returns:
        End of its output if it failed; "" if it read the expected answer.
    """
    command = [
        sys.executable, str(file), "--url", url, "--model-name", model, "--prompt", prompt,
        "--output-len", str(max_tokens), "--exclude-input-in-output",
        "--check-outputs", "--expected-outputs", json.dumps([expected]), *(["--streaming"] if streaming else []),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {_TIMEOUT_S:g} s"
    if done.returncode == 0 and "error from server" not in done.stdout:
        return ""
    return "\n".join([*done.stdout.splitlines()[-5:], *done.stderr.splitlines()[-5:]]) or (
        f"exit code {done.returncode}"
    )


def end_to_end(
    url: str,
    model: str,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    streaming: bool,
    metrics: bool = False,
    **lists: Any,
) -> list[str]:
    """Send the requests of upstream's end-to-end client, and put together its output.

    Args:
        **lists: Texts of further tensors by their names, such as stop_words.

    Returns:
        One text for each row of the batch.

    Raises:
        ServerError: An error came instead of an answer, or metrics that were asked for did not come.
    """
    from tritonclient import grpc
    from tritonclient.utils import np_to_triton_dtype

    rows = len(prompts)
    inputs: dict[str, Any] = {
        "text_input": np.array([[prompt] for prompt in prompts]).astype(object),
        "max_tokens": np.full((rows, 1), max_tokens, np.int32),
        "stream": np.full((rows, 1), streaming),
        "beam_width": np.ones((rows, 1), np.int32),
        "temperature": np.ones((rows, 1), np.float32),
        "exclude_input_in_output": np.full((rows, 1), True),
        **{name: np.array([values] * rows, dtype=object) for name, values in lists.items()},
    }
    outputs = ["text_output", *(["batch_index"] if rows > 1 else ())]
    if metrics:
        inputs["return_perf_metrics"] = np.full((rows, 1), True)
        outputs += PERFORMANCE
    tensors = []
    for name, value in inputs.items():
        tensor = grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    arrived: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: arrived.put(error or result), stream_timeout=_TIMEOUT_S)
        client.async_stream_infer(
            model, tensors, outputs=[grpc.InferRequestedOutput(name) for name in outputs], request_id="1"
        )
        client.stop_stream()
    texts = [""] * rows
    while not arrived.empty():
        result = arrived.get()
        if isinstance(result, Exception):
            raise ServerError(f"{model} answered upstream's request with an error: {result}") from result
        output, index = result.as_numpy("text_output"), result.as_numpy("batch_index")
        texts[0 if index is None else index[0][0]] += output[0].decode("utf-8")
        missing = [name for name in PERFORMANCE if metrics and result.as_numpy(name) is None]
        if missing:
            raise ServerError(f"{model} does not tell {', '.join(missing)}")
    return texts
