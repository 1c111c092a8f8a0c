"""Logits of prompts, and greedy answers: those of transformers, whatever is cached, and in however many steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.runtimes.cpu.engine import EngineRequest, RequestOutput
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.scheduler import MAX_CONTEXT_ROWS
from tests.runtimes.conftest import CHECKPOINTS, Pair
from tests.support.engine import answer, load, prompts, request

pytestmark = pytest.mark.models

# The last one takes several steps because of its logits alone.
PROMPTS = [*prompts(6), *prompts(1, shortest=300, longest=300, seed=1), [9]]


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(CHECKPOINTS / "support-target", dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[npt.NDArray[np.float32]]:
    """Logits of each prompt, [tokens - 1, vocabulary]: those after all of its tokens but the last."""
    import torch

    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0, :-1].numpy() for prompt in PROMPTS]


def test_greedy_answers_one_by_one_are_those_of_transformers(cpu_pair: Pair, model: Any) -> None:
    """Given prompt and answer, transformers (f32) would choose each token of the answer after those before it."""
    import torch

    core, asked, length = load(cpu_pair.target), prompts(16), 24
    answers = [answer(core, request(name, prompt, length))[0].tokens for name, prompt in enumerate(asked)]
    whole = [torch.tensor(prompt + tokens) for prompt, tokens in zip(asked, answers, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
    with torch.no_grad():
        chosen = model(padded).logits.argmax(dim=-1)
    for prompt, tokens, row in zip(asked, answers, chosen.tolist(), strict=True):
        assert len(tokens) == length
        assert tokens == row[len(prompt) - 1 : len(prompt) - 1 + length]


def asked(name: int, **more: Any) -> EngineRequest:
    return request(name, PROMPTS[name], 6, context_logits=True, **more)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_batch_tokens": 24}, {"prefix_caching": False}, {"max_draft_tokens": 3}],
    ids=["at once", "in chunks", "without a cache", "with a draft"],
)
def test_they_are_those_of_transformers(
    cpu_pair: Pair, expected: list[npt.NDArray[np.float32]], settings: dict[str, Any]
) -> None:
    draft = cpu_pair.draft if "max_draft_tokens" in settings else None
    core = load(cpu_pair.target, draft, max_concurrency=16, **settings)
    # The first round fills the cache.
    plain = answer(core, *(request(name, prompt, 6) for name, prompt in enumerate(PROMPTS)))
    made = answer(core, *(asked(name) for name in range(len(PROMPTS))))
    for name, (wanted, other) in enumerate(zip(plain, made, strict=True)):
        assert other.tokens == wanted.tokens
        assert other.metrics.kv_blocks_reused == 0
        assert len(other.context_logits) == len(PROMPTS[name]) - 1
        if other.context_logits:
            np.testing.assert_allclose(other.context_logits, expected[name], atol=2e-4)


def test_what_was_computed_for_them_is_reused_by_others(cpu_pair: Pair) -> None:
    core = load(cpu_pair.target)
    answer(core, asked(6))
    (again,) = answer(core, request("again", PROMPTS[6], 6))
    assert again.metrics.kv_blocks_reused > 0


def test_a_step_computes_few_of_them(cpu_pair: Pair) -> None:
    core = load(cpu_pair.target, max_concurrency=4)
    rows: list[int] = []

    def count(output: RequestOutput) -> None:
        rows.append(0 if output.context_logits is None else len(output.context_logits))

    for copy in range(3):
        core.add(EngineRequest(str(copy), tuple(PROMPTS[6]), 2, None, context_logits=True), count)
    while not core.idle:
        before = len(rows)
        core.step()
        assert sum(rows[before:]) <= MAX_CONTEXT_ROWS
    assert sum(rows) == 3 * (len(PROMPTS[6]) - 1)


def test_a_sink_that_fails_on_them_ends_its_request_alone(cpu_pair: Pair) -> None:
    core: EngineCore = load(cpu_pair.target, max_concurrency=4)

    def failing(_: RequestOutput) -> None:
        raise RuntimeError("made to fail")

    core.add(EngineRequest("failing", tuple(PROMPTS[0]), 4, None, context_logits=True), failing)
    (other,) = answer(core, asked(1))
    assert len(other.tokens) == 6
    assert core.stats().kv_blocks_used == 0
