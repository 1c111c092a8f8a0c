"""What TensorRT-LLM's own clients send (`pipeline.acceptance.upstream`), against our models."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from pipeline.acceptance.upstream import PERFORMANCE, end_to_end
from pipeline.serving.server import TritonServer
from tests.support.engine import QUESTIONS, TURN
from tests.support.streams import joined, stream

PROMPTS = [TURN.format(question) for question in QUESTIONS[:2]]
MODELS = ["ensemble", "tensorrt_llm_bls"]
TOKENS = 20


@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("model", MODELS)
def test_the_end_to_end_client_reads_every_answer(server: TritonServer, model: str, streaming: bool) -> None:
    expected = [
        joined(server.grpc_url, model, text_input=prompt, max_tokens=TOKENS, exclude_input_in_output=True)
        for prompt in PROMPTS
    ]
    assert all(expected)
    ask = functools.partial(end_to_end, server.grpc_url, model, max_tokens=TOKENS, streaming=streaming)
    assert ask(PROMPTS[:1]) == expected[:1]
    assert ask(PROMPTS) == expected
    # As upstream's tests send them.
    assert ask(PROMPTS[:1], stop_words=[""], bad_words=[""]) == expected[:1]


@pytest.mark.parametrize("model", MODELS)
def test_the_end_to_end_client_reads_what_an_answer_cost(server: TritonServer, model: str) -> None:
    assert all(end_to_end(server.grpc_url, model, PROMPTS, max_tokens=TOKENS, streaming=False, metrics=True))


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
