"""Log probabilities of a prompt: reduced from logits in any pieces, and asked of an engine that has logits only."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared.prompt_log_probs import PROMPT_LOG_PROBS, PromptLogProbTable

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "model_repo" / "tensorrt_llm_bls" / "1"))
import engine_call
from shared.prompts import Prompts
from test_draft_calls import Engine, tokens

VOCAB = 30


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    k=st.sampled_from([0, 1, 5, 20]),
    seed=st.integers(0, 99),
)
def test_pieces_give_the_log_softmax(prompt: list[int], cuts: list[int], k: int, seed: int) -> None:
    # Few different values, so that there are ties.
    logits = np.random.default_rng(seed).integers(-4, 4, (len(prompt), VOCAB)).astype(np.float32)
    table = PromptLogProbTable(prompt, k)
    edges = [0, *sorted(min(cut, len(prompt)) for cut in cuts), len(prompt)]
    for begin, end in itertools.pairwise(edges):
        table.read(logits[begin:end])
    assert table.complete
    made = table.tensors()
    values, ids = made["prompt_log_probs"][0], made["prompt_log_probs_ids"][0]
    assert ids[:, 0].tolist() == prompt
    assert np.isnan(values[0]).all()
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    for at in range(1, len(prompt)):
        np.testing.assert_allclose(values[at], exact[at - 1][ids[at]], atol=1e-5)
        best = sorted(range(VOCAB), key=lambda token: (-exact[at - 1][token], token))[:k]
        assert ids[at, 1:].tolist() == best


def call(monkeypatch: pytest.MonkeyPatch, engine: Any, inputs: dict[str, Any]) -> engine_call.EngineCall:
    monkeypatch.setattr(engine_call, "read", lambda request, name: request.get(name))
    monkeypatch.setattr(engine_call, "read_flag", lambda request, name: bool(request.get(name)))
    monkeypatch.setattr(engine_call, "engine_id", lambda _: "id")
    one = np.array([[1]], np.int32)
    empty = np.zeros((1, 2, 0), np.int32)
    prompts = Prompts(
        np.array([[3, 4, 5]], np.int32), 3 * one, empty, empty, np.zeros((1, 0), np.float32), one, one
    )
    return engine_call.EngineCall(engine, inputs, prompts, context_logits=True, vocab_size=VOCAB)


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_is_asked_once_for_logits_alone(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """A C++ engine pads its vocabulary, and sends the logits of the prompt with every response of a stream."""
    logits = np.random.default_rng(1).standard_normal((1, 3, VOCAB + 2)).astype(np.float16)
    logits[..., VOCAB:] = 99
    engine = Engine(tokens(8, 9) | {"context_logits": logits})
    request = {
        "max_tokens": np.array([[2]], np.int32),
        "stream": np.array([[streams]]),
        "return_prompt_log_probs": np.array([[2]], np.int32),
    }
    made = call(monkeypatch, engine, request)
    (response,) = made.responses()
    (asked,) = engine.asked
    assert asked["return_context_logits"].tolist() == [[True]]
    assert "streaming" not in asked
    assert ("exclude_input_in_output" in asked) == streams
    assert "return_prompt_log_probs" not in asked
    assert "context_logits" in asked["outputs"]
    assert not {*PROMPT_LOG_PROBS} & {*asked["outputs"]}
    assert {*PROMPT_LOG_PROBS} <= {*made.asked_for}
    expected = PromptLogProbTable([3, 4, 5], 2)
    expected.read(logits[0, :, :VOCAB])
    for name, array in expected.tensors().items():
        np.testing.assert_array_equal(response[name], array)


def test_an_engine_that_has_reused_a_part_of_the_prompt_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(tokens(8) | {"context_logits": np.zeros((1, 1, VOCAB), np.float32)})
    request = {"max_tokens": np.array([[2]]), "return_prompt_log_probs": np.array([[0]], np.int32)}
    with pytest.raises(
        RuntimeError, match=r"has not computed the whole prompt: kv_cache\.reuse must be false"
    ):
        list(call(monkeypatch, engine, request).responses())
