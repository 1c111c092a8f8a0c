"""From logits to tokens: what may be chosen, how often, and that it depends on nothing else."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtimes.cpu.engine import EngineRequest, EngineSettings, InvalidRequest, SamplingParams
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.sampler import RandomDraw, SamplingRow, choose, gumbel, sample
from pipeline.runtimes.cpu.engine.sequence import Sequence
from tests.support.engine import FakeModel, answer, request

VOCAB = 50
DRAWS = 5000
Floats = npt.NDArray[np.float32]


def logits(rows: int = 1, seed: int = 0) -> Floats:
    return (2 * np.random.default_rng(seed).standard_normal((rows, VOCAB))).astype(np.float32)


def softmax(row: Floats) -> npt.NDArray[np.float64]:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def draws(row: Floats, top_k: int, top_p: float, count: int) -> list[int]:
    return sample([RandomDraw(row[0], top_k, top_p, seed, 0) for seed in range(count)])


def sequence(prompt: tuple[int, ...] = (1, 2, 3), generated: tuple[int, ...] = (), **more: Any) -> Sequence:
    made = Sequence(EngineRequest("1", prompt, 20, more.pop("end_id", None), **more), lambda _: None, VOCAB)
    for token in generated:
        made.append(token)
    return made


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 0.0), (10, 0.6), (0, 1e-9)])
def test_frequencies_are_those_of_the_filtered_distribution(top_k: int, top_p: float) -> None:
    row = logits()
    expected = softmax(row[0])
    order = np.argsort(-expected)
    if top_k:
        expected[order[top_k:]] = 0
        expected /= expected.sum()
    if top_p:
        before = np.cumsum(expected[order]) - expected[order]
        expected[order[before >= top_p]] = 0
        expected /= expected.sum()
    counts = np.bincount(draws(row, top_k, top_p, DRAWS), minlength=VOCAB)
    assert not counts[expected == 0].any()
    likely = expected * DRAWS >= 5
    chi2 = ((counts - expected * DRAWS) ** 2)[likely] / (expected * DRAWS)[likely]
    assert chi2.sum() < likely.sum() + 5 * np.sqrt(2 * likely.sum())


@given(st.integers(0, 2**32 - 1), st.integers(0, VOCAB + 5), st.floats(0, 1))
def test_what_is_chosen_is_within_top_k_and_top_p(seed: int, top_k: int, top_p: float) -> None:
    row = logits(seed=seed)
    shares = softmax(row[0])
    for token in draws(row, top_k, top_p, 20):
        better = np.sort(shares[shares > shares[token]])
        assert len(better) < (top_k or VOCAB)
        kept = np.sort(shares)[::-1][: top_k or VOCAB].sum()
        assert better.sum() < (top_p or 1.0) * kept + 1e-6


@given(st.data())
def test_neighbours_do_not_matter(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 6))
    block = logits(count, seed=data.draw(st.integers(0, 1000)))
    separate = [
        RandomDraw(row, data.draw(st.integers(0, 60)), data.draw(st.floats(0, 1)), seed=7 * at, position=at)
        for at, row in enumerate(block)
    ]
    assert sample(separate) == [sample([draw])[0] for draw in separate]


def test_noise_is_gumbel_and_differs_in_every_part_of_its_key() -> None:
    zero, many = np.zeros(1, np.uint64), np.arange(DRAWS, dtype=np.uint64)
    for key in ((many, zero, zero), (zero, many, zero), (zero, zero, many)):
        noise = gumbel(*key)
        assert len(np.unique(noise)) == DRAWS
        assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.06)
        assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.15)
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.05


def test_greedy_rows_beside_sampled_ones() -> None:
    assert SamplingParams(temperature=0, top_k=5).greedy
    assert SamplingParams(top_k=1, top_p=0.9).greedy
    assert not SamplingParams(top_k=2).greedy
    block = logits(3)
    rows = [
        SamplingRow(sequence(), 0),
        SamplingRow(sequence(sampling=SamplingParams(top_p=0.9, seed=1)), 0),
        SamplingRow(sequence(), 0),
    ]
    chosen = choose(block, rows).tokens
    assert chosen[0] == block[0].argmax()
    assert chosen[2] == block[2].argmax()


def reference(
    row: Floats, seen: list[int], sampling: SamplingParams, bias: Floats | None
) -> npt.NDArray[np.float64]:
    """TensorRT-LLM's batchApplyPenalty, token by token."""
    result = row.astype(np.float64)
    for token in range(VOCAB):
        value = result[token] + (0 if bias is None else bias[token])
        value /= sampling.temperature or 1
        occurrences = seen.count(token)
        if occurrences:
            penalty = sampling.repetition_penalty
            value = value * penalty if value < 0 else value / penalty
            value -= sampling.presence_penalty
            value -= sampling.frequency_penalty * occurrences
        result[token] = value
    return result


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.floats(0.2, 2),
    st.floats(0.5, 2),
    st.floats(-1, 1),
    st.floats(-1, 1),
    st.booleans(),
)
def test_penalties_look_at_prompt_answer_and_drafts(
    prompt: list[int], later: list[int], temperature: float, repetition: float, presence: float, frequency: float,
    biased: bool,
) -> None:  # fmt: skip
    sampling = SamplingParams(temperature, 0, 0, 1, 1, -1, repetition, presence, frequency)
    bias = logits(seed=3)[0] if biased else None
    half = len(later) // 2
    made = sequence(
        tuple(prompt), tuple(later[:half]), sampling=sampling, embedding_bias=bias, log_probs=True
    )
    made.drafts = [*later[half:], 0]
    row = logits(seed=len(prompt))
    chosen = choose(row, [SamplingRow(made, len(later) - half)])
    expected = reference(row[0], prompt + later, sampling, bias)
    assert expected[chosen.tokens[0]] == pytest.approx(expected.max(), abs=1e-5)
    assert chosen.log_probs[0] == pytest.approx(
        expected.max() - np.log(np.exp(expected - expected.max()).sum()) - expected.max(), abs=1e-4
    )


def test_log_probs_are_of_the_distribution_before_top_k() -> None:
    row = logits()
    made = sequence(sampling=SamplingParams(temperature=0.7, top_k=3, seed=5), log_probs=True)
    chosen = choose(row, [SamplingRow(made, 0)])
    assert chosen.log_probs[0] == pytest.approx(
        np.log(softmax(row[0] / np.float32(0.7))[chosen.tokens[0]]), abs=1e-5
    )


def test_min_new_tokens_holds_back_end_id_and_stop_words() -> None:
    row = logits()
    best, second, third = np.argsort(-row[0])[:3].tolist()
    made = sequence(end_id=best, stop_words=((second,),), min_new_tokens=2)
    assert choose(row, [SamplingRow(made, 0)]).tokens == [third]
    made.append(7)
    made.drafts = [7]
    assert choose(np.repeat(row, 2, axis=0), [SamplingRow(made, 0), SamplingRow(made, 1)]).tokens == [
        third,
        best,
    ]


def test_top_p_that_is_not_set_stays_so() -> None:
    """Else it would be at its least from the second token on, and top-k would keep one token."""
    assert SamplingParams(top_k=2).next_top_p(0.0, 7) == 0
    core = EngineCore(FakeModel(), None, EngineSettings(max_concurrency=8, kv_blocks=200))  # type: ignore[arg-type]
    seeds = range(40)
    answers = [
        answer(
            core, request(seed, [1, 2, 3], 2, sampling=SamplingParams(top_k=2, temperature=9.0, seed=seed))
        )
        for seed in seeds
    ]
    assert len({tuple(answered.tokens) for (answered,) in answers}) == 4


def test_top_p_decays_and_is_restored() -> None:
    sampling = SamplingParams(top_p=0.8, top_p_decay=0.5, top_p_min=0.3, top_p_reset_id=9)
    made = sequence(sampling=sampling)
    seen = []
    for token in (1, 2, 9, 3):
        made.append(token)
        seen.append(made.top_p)
    assert seen == pytest.approx([0.4, 0.3, 0.8, 0.4])


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", float("nan")), ("temperature", 1e-40), ("top_k", -1), ("top_p", 1.1), ("top_p_decay", 0.0),
     ("repetition_penalty", 1e38), ("presence_penalty", float("inf"))],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} = {re.escape(repr(value))}: must be "):
        SamplingParams(**{name: value})


@given(
    temperature=st.sampled_from([0, 1e-10, 1e10]),
    repetition=st.sampled_from([1e-10, 1e10]),
    penalty=st.sampled_from([-1e10, 1e10]),
    biases=st.lists(st.sampled_from([-np.inf, -1e10, 1e10]), min_size=1, max_size=VOCAB - 1),
    seed=st.integers(0, 9),
)
def test_what_is_taken_stays_within_the_range_of_numbers(
    temperature: float, repetition: float, penalty: float, biases: list[float], seed: int
) -> None:
    sampling = SamplingParams(
        temperature, top_p=1.0, repetition_penalty=repetition, frequency_penalty=penalty, seed=seed
    )
    bias = np.array(biases + [0.0] * (VOCAB - len(biases)), np.float32)
    made = sequence(generated=(7,) * 9, sampling=sampling, embedding_bias=bias, log_probs=True)
    with np.errstate(over="raise", invalid="raise"):
        (token,), (log_prob,) = choose(100 * logits(seed=seed), [SamplingRow(made, 0)])
    assert bias[token] > -np.inf
    assert -np.inf < log_prob <= 0
