"""Drafts that come with logits: what comes out is distributed as the target alone would have it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtimes.cpu.engine import EngineSettings, InvalidRequest, SamplingParams
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.sampler import accept_or_resample, gumbel
from tests.support.engine import VOCAB, Answer, FakeModel, answer, next_logits, request

PROMPT = [1, 2, 3]
CONCURRENCY = 8


def distance(counts: Counter[Any], shares: dict[Any, float]) -> float:
    """Half the sum of the differences between what was seen and what should be: 0 to 1."""
    total = counts.total()
    return sum(abs(counts[key] / total - shares.get(key, 0)) for key in {*counts, *shares}) / 2


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


def drawn(q: np.ndarray, seed: int, position: int) -> int:
    ids = np.arange(len(q), dtype=np.uint64)
    full = np.full(len(q), 1, np.uint64)
    noise = gumbel(full * np.uint64(seed), full * np.uint64(position), ids)
    return int((np.log(q) + noise).argmax())


@pytest.mark.parametrize("same_seed", [True, False])
def test_the_verdict_is_distributed_as_the_target(same_seed: bool) -> None:
    """Even if the draft drew with the very seed: other random numbers decide."""
    random = np.random.default_rng(5)
    p, q = (softmax(2 * random.standard_normal(6)) for _ in range(2))
    counts: Counter[int] = Counter()
    kept = 0
    for seed in range(6000):
        token = drawn(q, seed if same_seed else seed + 10**6, 3)
        counts[taken := accept_or_resample(p, q, token, seed=seed, position=3)] += 1
        kept += taken == token
    assert distance(counts, dict(enumerate(p))) < 0.025
    assert kept / 6000 == pytest.approx(np.minimum(p, q).sum(), abs=0.03)  # the best that any rule can do


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(0, 5), st.floats(0, 2))
def test_a_threshold_decides_alone(seed: int, position: int, token: int, threshold: float) -> None:
    random = np.random.default_rng(seed)
    p, q = (softmax(3 * random.standard_normal(6)) for _ in range(2))
    taken = accept_or_resample(p, q, token, seed=seed, position=position, threshold=threshold)
    assert (taken == token) == (p[token] > threshold * q[token])
    assert p[taken] > 0


def make(noise: float = 0.0) -> EngineCore:
    chosen = EngineSettings(max_concurrency=CONCURRENCY, max_draft_tokens=4, kv_blocks=200)
    return EngineCore(FakeModel(noise), None, chosen)  # type: ignore[arg-type]


def proposals(draft: EngineCore, count: int, choices: Sequence[SamplingParams]) -> list[Answer]:
    return answer(
        draft, *(request(at, PROMPT, count, sampling=one, logits=True) for at, one in enumerate(choices))
    )


@pytest.fixture(scope="module")
def pair() -> tuple[EngineCore, EngineCore]:
    return make(), make(noise=1.0)


@pytest.mark.models
@pytest.mark.parametrize("more", [{"top_p": 0.9, "temperature": 1.5}, {"top_k": 5, "presence_penalty": 0.7}])
def test_two_tokens_from_draft_and_target(pair: tuple[EngineCore, EngineCore], more: dict[str, Any]) -> None:
    """Both are distributed as without a draft: the first, and the second for what the first is."""
    target, draft = pair
    alone: Counter[tuple[int, ...]] = Counter()
    drafted: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seeds in (range(at, at + CONCURRENCY) for at in range(0, 1000, CONCURRENCY)):
        choices = [SamplingParams(seed=seed, **more) for seed in seeds]
        first = []
        for seed, sampling, proposed in zip(seeds, choices, proposals(draft, 2, choices), strict=True):
            rows = [output.logits for output in proposed.outputs if output.logits is not None]
            drafts = {"draft_tokens": tuple(proposed.tokens), "draft_logits": np.concatenate(rows)}
            first.append(request(seed, PROMPT, 3, sampling=sampling, **drafts))
        for judged in answer(target, *first):
            accepted += judged.metrics.draft_tokens_accepted
            drafted[tuple(judged.tokens[:2])] += 1
        plain = (
            request(seed, PROMPT, 2, sampling=sampling) for seed, sampling in zip(seeds, choices, strict=True)
        )
        alone.update(tuple(got.tokens) for got in answer(target, *plain))
    shares = {key: count / alone.total() for key, count in alone.items()}
    assert 160 < accepted < 2000
    assert distance(drafted, shares) < 0.11  # two samples of 1000 from one distribution: about 0.07


def test_logits_are_the_models_own(pair: tuple[EngineCore, EngineCore]) -> None:
    got = answer(
        pair[0],
        request("l", PROMPT, 5, logits=True, sampling=SamplingParams(temperature=2.0, top_k=3, seed=1)),
    )[0]
    rows = np.concatenate([output.logits for output in got.outputs if output.logits is not None])
    assert rows.shape == (5, VOCAB)
    for number, row in enumerate(rows):
        assert np.allclose(row, next_logits([*PROMPT, *got.tokens[:number]]))


@settings(max_examples=20)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), st.integers(0, 10))
def test_greedy_logits_change_nothing(drafts: list[int], seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((len(drafts), VOCAB)).astype(np.float32)
    core = make()
    plain = answer(core, request("p", PROMPT, 8))[0]
    drafted = answer(core, request("d", PROMPT, 8, draft_tokens=tuple(drafts), draft_logits=logits))[0]
    assert drafted.tokens == plain.tokens


def test_rows_must_fit() -> None:
    with pytest.raises(
        InvalidRequest, match=r"draft_logits = \(1, 12\): must be a row for each of 2 draft_tokens"
    ):
        request("r", PROMPT, 8, draft_tokens=(1, 2), draft_logits=np.zeros((1, VOCAB), np.float32))
    with pytest.raises(InvalidRequest, match="draft_logits: has rows of 3 numbers, must have 12"):
        make().check(request("r", PROMPT, 8, draft_tokens=(1,), draft_logits=np.zeros((1, 3), np.float32)))
