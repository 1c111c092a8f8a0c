"""Requests of TensorRT-LLM's own clients (`pipeline.bench.accept.upstream`), and of those that keep their own loop."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.bench.accept.upstream import PERFORMANCE, end_to_end
from pipeline.serving.server import TritonServer
from tests.support import CHECKPOINTS
from tests.support.engine import QUESTIONS, TURN, questions
from tests.support.streams import infer, joined, stream

TOKENIZER = Tokenizer.from_file(str(CHECKPOINTS / "support-target" / "tokenizer.json"))
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


# Besides the prompt, what inflight_batcher_llm_client.py (NVIDIA/TensorRT-LLM @000a01de66f0) sends, and which of its
# options asks for which tensor.
INFLIGHT: dict[str, np.ndarray[Any, Any]] = {
    "beam_width": np.array([[1]], np.int32), "temperature": np.array([[1.0]], np.float32),
    "streaming": np.array([[True]]), "end_id": np.array([[5]], np.int32), "pad_id": np.array([[0]], np.int32),
    "runtime_top_k": np.array([[1]], np.int32), "runtime_top_p": np.array([[0.0]], np.float32),
    "request_output_len": np.array([[TOKENS]], np.int32),
}  # fmt: skip
OPTIONS = {
    "--return-log-probs": ("return_log_probs", ("cum_log_probs", "output_log_probs")),
    "--return-perf-metrics": ("return_perf_metrics", PERFORMANCE),
    "--return-num-input-tokens": ("return_num_input_tokens", ("num_input_tokens",)),
    "--return-num-output-tokens": ("return_num_output_tokens", ("num_output_tokens",)),
    "--exclude-input-in-output": ("exclude_input_in_output", ()),
}


def test_the_inflight_client_reads_every_response(server: TritonServer) -> None:
    """It adds up tokens and log probabilities, and keeps the last of all else that it asked for."""
    ids = np.array([questions()[0]], np.int32)
    asked = {**INFLIGHT, "input_ids": ids, "input_lengths": np.array([[ids.shape[1]]], np.int32)}
    plain = [id for chunk in stream(server.grpc_url, "tensorrt_llm", **asked) for id in chunk.tokens]
    assert len(plain) == TOKENS
    for flag, outputs in OPTIONS.values():
        responses = list(
            stream(server.grpc_url, "tensorrt_llm", request_id="1", **asked, **{flag: np.array([[True]])})
        )
        assert [id for response in responses for id in response.outputs["output_ids"][0][0]] == plain
        for response in responses:
            assert response.outputs["sequence_length"][0][0] == len(response.tokens)
            assert "log" not in flag or all(
                response.outputs[name][0].size == len(response.tokens) for name in outputs[1:]
            )
        assert all(responses[-1].outputs[name].size for name in outputs)


@pytest.mark.parametrize("model", MODELS)
def test_an_empty_list_of_biased_words_is_none(server: TritonServer, model: str) -> None:
    """speculative_decoding_test.py sends one with each request: tensors of no elements."""
    asked: dict[str, Any] = {"text_input": PROMPTS[0], "max_tokens": TOKENS, "exclude_input_in_output": True}
    empty = {
        "embedding_bias_words": np.array([[]], np.object_),
        "embedding_bias_weights": np.array([[]], np.float32),
    }
    assert joined(server.grpc_url, model, **asked, **empty) == joined(server.grpc_url, model, **asked)


def test_the_ensemble_by_hand(server: TritonServer) -> None:
    queries = np.array([[prompt.encode()] for prompt in PROMPTS], np.object_)
    lengths = np.full((2, 1), 20, np.int32)
    made = infer(server.grpc_url, "preprocessing", QUERY=queries, REQUEST_OUTPUT_LEN=lengths)
    assert made["INPUT_ID"].shape == (2, max(made["REQUEST_INPUT_LEN"].reshape(-1)))
    assert made["DECODER_INPUT_ID"].shape == made["REQUEST_DECODER_INPUT_LEN"].shape == (2, 1)
    assert made["OUT_END_ID"].tolist() == [[5], [5]]
    rows: dict[int, list[int]] = {}
    for response in stream(
        server.grpc_url,
        "tensorrt_llm",
        input_ids=made["INPUT_ID"],
        input_lengths=made["REQUEST_INPUT_LEN"],
        request_output_len=made["REQUEST_OUTPUT_LEN"],
        end_id=made["OUT_END_ID"],
        stop_words_list=made["STOP_WORDS_IDS"],
    ):
        assert response.outputs["output_ids"].shape == (1, 1, response.outputs["sequence_length"].item())
        rows[response.outputs["batch_index"].item()] = response.tokens
    for row, prompt in enumerate(PROMPTS):
        text = infer(
            server.grpc_url,
            "postprocessing",
            TOKENS_BATCH=np.array([[rows[row]]], np.int32),
            SEQUENCE_LENGTH=np.array([[len(rows[row])]], np.int32),
        )["OUTPUT"]
        assert text.item().decode() == joined(server.grpc_url, "ensemble", text_input=prompt, max_tokens=20)


def test_postprocessing_cuts_each_beam_to_its_length(server: TritonServer) -> None:
    ids = TOKENIZER.encode("one two three", add_special_tokens=False).ids
    tokens = np.array([[ids, ids]], np.int32)
    lengths = np.array([[1, len(ids)]], np.int32)
    texts = infer(server.grpc_url, "postprocessing", TOKENS_BATCH=tokens, SEQUENCE_LENGTH=lengths)["OUTPUT"]
    assert [text.decode() for text in texts] == [TOKENIZER.decode(ids[:1]), "one two three"]


def test_preprocessing_with_everything(server: TritonServer) -> None:
    made = infer(
        server.grpc_url, "preprocessing", QUERY="Hello", REQUEST_OUTPUT_LEN=4, DECODER_QUERY="there",
        STOP_WORDS_DICT=["a", "b"],
        BAD_WORDS_DICT=["c"], EMBEDDING_BIAS_WORDS=["d"], EMBEDDING_BIAS_WEIGHTS=np.array([[2.0]], np.float32),
        END_ID=9, PAD_ID=8, PROMPT_TABLE_EXTRA_ID=np.array([[7]], np.uint64),
    )  # fmt: skip
    assert made["STOP_WORDS_IDS"].shape[1] == made["BAD_WORDS_IDS"].shape[1] == 2
    assert made["EMBEDDING_BIAS"].shape == (1, 2048)
    assert (made["OUT_END_ID"].item(), made["OUT_PAD_ID"].item()) == (9, 8)
    assert made["DECODER_INPUT_ID"].shape[1] == made["REQUEST_DECODER_INPUT_LEN"].item() > 0
    assert made["OUT_PROMPT_TABLE_EXTRA_IDS"].dtype == np.uint64
