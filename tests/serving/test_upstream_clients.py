"""TensorRT-LLM's own clients against our models: what they send, and how they read what comes back.

Written after triton_backend/inflight_batcher_llm/client/end_to_end_grpc_client.py (NVIDIA/TensorRT-LLM @2a9abd9536aa)
and e2e_grpc_speculative_decoding_client.py (@7ed07f0691df): the same tensors in the same shapes, and the same indexes.
"""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.utils import np_to_triton_dtype

from pipeline.serving.server import TritonServer
from tests.support.engine import QUESTIONS, TURN
from tests.support.streams import joined, stream

PROMPTS = [TURN.format(question) for question in QUESTIONS[:2]]
MODELS = ["ensemble", "tensorrt_llm_bls"]
PERFORMANCE = (
    "kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks", "arrival_time_ns",
    "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns", "acceptance_rate",
    "total_accepted_draft_tokens", "total_draft_tokens",
)  # fmt: skip


def end_to_end(
    server: TritonServer,
    model: str,
    prompts: list[str],
    *,
    streaming: bool,
    metrics: bool = False,
    **words: Any,
) -> list[str]:
    """The texts that upstream's end-to-end client puts together, a row of the batch each."""
    rows = len(prompts)
    inputs = {
        "text_input": np.array([[prompt] for prompt in prompts]).astype(object),
        "max_tokens": np.full((rows, 1), 20, np.int32),
        "stream": np.full((rows, 1), streaming),
        "beam_width": np.ones((rows, 1), np.int32),
        "temperature": np.ones((rows, 1), np.float32),
        "exclude_input_in_output": np.full((rows, 1), True),
        **{name: np.array([values] * rows, dtype=object) for name, values in words.items()},
    }
    outputs = ["text_output", *(["batch_index"] if rows > 1 else ())]
    if metrics:
        inputs["return_perf_metrics"] = np.full((rows, 1), True)
        outputs += PERFORMANCE
    arrived: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put(error or result))
        client.async_stream_infer(
            model,
            [tensor(name, value) for name, value in inputs.items()],
            outputs=[grpc.InferRequestedOutput(name) for name in outputs],
            request_id="1",
        )
        client.stop_stream()
    texts = [""] * rows
    while not arrived.empty():
        result = arrived.get()
        if isinstance(result, Exception):
            raise result
        output, index = result.as_numpy("text_output"), result.as_numpy("batch_index")
        row = 0 if index is None else index[0][0]
        texts[row] += output[0].decode("utf-8")
        if metrics:
            assert all(result.as_numpy(name)[0][0] >= 0 for name in PERFORMANCE)
    return texts


def tensor(name: str, value: np.ndarray[Any, Any]) -> grpc.InferInput:
    made = grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made


@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("model", MODELS)
def test_the_end_to_end_client_reads_every_answer(server: TritonServer, model: str, streaming: bool) -> None:
    expected = [
        joined(server.grpc_url, model, text_input=prompt, max_tokens=20, exclude_input_in_output=True)
        for prompt in PROMPTS
    ]
    assert all(expected)
    assert end_to_end(server, model, PROMPTS[:1], streaming=streaming) == expected[:1]
    assert end_to_end(server, model, PROMPTS, streaming=streaming) == expected
    no_words = {"stop_words": [""], "bad_words": [""]}  # as upstream's tests send them
    assert end_to_end(server, model, PROMPTS[:1], streaming=streaming, **no_words) == expected[:1]


@pytest.mark.parametrize("model", MODELS)
def test_the_end_to_end_client_reads_what_an_answer_cost(server: TritonServer, model: str) -> None:
    assert all(end_to_end(server, model, PROMPTS, streaming=False, metrics=True))


@pytest.mark.parametrize("model", ["tensorrt_llm", *MODELS])
def test_the_reuse_of_the_kv_cache_is_told_as_releases_before_0_19_did(
    server: TritonServer, model: str
) -> None:
    """A prompt that is asked again finds its blocks."""
    prompt = "".join(f"{len(model)} {number} " for number in range(40))
    asked: dict[str, Any] = {"text_input": prompt, "max_tokens": 4}
    if model == "tensorrt_llm":
        ids = np.arange(7, 107, dtype=np.int32)[None]
        asked = {"input_ids": ids, "input_lengths": ids.shape[1], "request_output_len": 4}
    counts = []
    for _ in range(2):
        responses = list(stream(server.grpc_url, model, return_kv_cache_reuse_stats=True, **asked))
        outputs = next(response.outputs for response in reversed(responses) if response.outputs)
        figures = {name: outputs[name] for name in PERFORMANCE if name in outputs}
        assert set(figures) == set(PERFORMANCE[:3])
        assert all(array.shape == (1, 1) and array.dtype == np.int32 for array in figures.values())
        counts.append({name: array.item() for name, array in figures.items()})
    first, second = counts
    assert first["kv_cache_reused_blocks"] < second["kv_cache_reused_blocks"]
    assert first["kv_cache_alloc_new_blocks"] > second["kv_cache_alloc_new_blocks"]
    for name in ("return_perf_metrics", "return_kv_cache_reuse_stats"):
        both = {"return_perf_metrics": True, "return_kv_cache_reuse_stats": True, name: False}
        last = [r.outputs for r in stream(server.grpc_url, model, **both, **asked) if r.outputs][-1]
        assert ("arrival_time_ns" in last) == both["return_perf_metrics"]
        assert "kv_cache_reused_blocks" in last
