"""Sampled answers of draft and target are distributed as the target alone would have them, round after round.

The engines are real but for their models, whose distributions can be computed by hand.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.runtimes.cpu.engine import EngineRequest, EngineSettings, SamplingParams
from pipeline.runtimes.cpu.engine.core import EngineCore
from tests.support.engine import Answer, FakeModel, next_logits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "model_repo" / "tensorrt_llm_bls" / "1"))
from draft_calls import EnginePair
from draft_target import DraftTarget
from speculation import DraftHealth, DraftSettings

PROMPT, TOKENS, TOP_K = [1, 2, 3], 3, 2
ANSWERS = 600


class Engine:
    """An engine behind the tensors of its model."""

    def __init__(self, noise: float) -> None:
        settings = EngineSettings(max_concurrency=8, max_draft_tokens=4, kv_blocks=200)
        self._core = EngineCore(FakeModel(noise), None, settings)  # type: ignore[arg-type]
        self._ids = count()

    def responses(
        self, request_id: str, inputs: Mapping[str, Any], outputs: Sequence[str], **_: object
    ) -> Iterator[Mapping[str, Any]]:
        drafts, logits = inputs.get("draft_input_ids"), inputs.get("draft_logits")
        answer, id = Answer(), f"{request_id} {next(self._ids)}"
        asked = EngineRequest(
            id,
            tuple(inputs["input_ids"][0].tolist()),
            int(inputs["request_output_len"].item()),
            None,
            sampling=SamplingParams(top_k=TOP_K, temperature=1.5, seed=int(inputs["seed"].item())),
            draft_tokens=None if drafts is None else tuple(drafts[0].tolist()),
            draft_logits=None if logits is None else logits[0],
            logits="generation_logits" in outputs,
        )
        self._core.add(asked, answer)
        while not self._core.idle:
            self._core.step()
            if drafts is not None and answer.outputs:
                self._core.cancel(id)  # as the model does, after one step
        yield {
            "output_ids": np.array([[answer.tokens]], np.int32),
            "sequence_length": np.array([[len(answer.tokens)]], np.int32),
            "total_draft_tokens": np.array([[answer.metrics.draft_tokens_total]], np.int32),
        } | ({"generation_logits": _logits(answer)} if asked.logits else {})

    def stop(self, request_id: str) -> None:
        raise AssertionError(request_id)


def _logits(answer: Answer) -> Any:
    return np.concatenate([output.logits for output in answer.outputs if output.logits is not None])[
        None, None
    ]


def shares() -> dict[tuple[int, ...], float]:
    """How often each answer must come, exactly."""
    found = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for answer, share in found.items():
            logits = next_logits([*PROMPT, *answer]).astype(np.float64) / 1.5
            best = np.argsort(logits)[-TOP_K:]
            weights = np.exp(logits[best] - logits[best].max())
            for token, weight in zip(best.tolist(), weights / weights.sum(), strict=True):
                longer[*answer, token] = share * weight
        found = longer
    return found


@pytest.mark.parametrize("use_logits", [False, True])
def test_every_answer_comes_as_often_as_it_should(use_logits: bool) -> None:
    target, draft = Engine(0.0), Engine(0.8)
    speculation = DraftSettings(draft, DraftHealth(print), max_draft_tokens=4)  # type: ignore[arg-type]
    counts: Counter[tuple[int, ...]] = Counter()
    proposed = accepted = 0
    for seed in range(ANSWERS):
        pair = EnginePair(
            target,  # type: ignore[arg-type]
            speculation,
            {"seed": np.array([[seed]], np.uint64)},
            request_id=str(seed),
            streams=True,
            log_probs=False,
            use_logits=use_logits,
        )
        loop = DraftTarget(pair, PROMPT, max_tokens=TOKENS, draft_tokens=2)
        counts[tuple(token for step in loop.steps() for token in step.tokens)] += 1
        proposed += loop.proposed
        accepted += loop.accepted
    right = shares()
    distance = sum(abs(counts[key] / ANSWERS - right.get(key, 0)) for key in {*counts, *right}) / 2
    assert distance < 0.08  # 8 answers: about 0.04 for samples that are right
    assert 0.2 < accepted / proposed < 0.99
