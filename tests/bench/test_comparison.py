"""A regression told from noise: by simulation with known differences, and by what two stored runs allow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.bench import statistics as ratios
from pipeline.bench.compare import figures as comparison
from pipeline.bench.compare.figures import METRICS, compare_rounds
from pipeline.bench.compare.run import compare_files
from pipeline.bench.result import BenchResult, Distribution, Generator, LevelResult
from pipeline.bench.statistics import holm, rounds_needed
from pipeline.errors import InvalidInput

Values = NDArray[np.float64]
NO_LIMIT = Generator(late_p99_ms=0, cpu_share=0, late_sent_p99_ms=0, limits="")


def level(
    latencies: dict[str, Distribution], per_s: float, samples: dict[str, Sequence[float]] | None = None
) -> LevelResult:
    return LevelResult(
        kind="concurrency", value=8, seconds=10, errors={}, input_tokens_mean=None, output_tokens_mean=None,
        requests={"complete": 100, "left": 0, "refused": 0, "failed": 0, "abandoned": 0}, requests_per_s=per_s,
        output_tokens_per_s=10 * per_s, input_tokens_per_s=None, goodput_per_s=per_s, good_share=1,
        latencies=latencies, acceptance=None, cached_share=None, in_flight_max=8, generator=NO_LIMIT,
        samples={name: tuple(values) for name, values in (samples or {}).items()},
    )  # fmt: skip


def round_of(factors: Values) -> LevelResult:
    """What one round measured: the figures of a server, each times what this round made of it."""

    def latency(p50: float, p95: float) -> Distribution:
        return Distribution(
            count=100, mean=p50, p50=p50, p90=p95, p95=p95, p99=p95, max=p95, intervals={}, histogram=((), ())
        )

    ttft, ttft95, itl, itl95, tpot, total, rate = factors
    latencies = {"ttft": latency(50 * ttft, 90 * ttft95), "itl": latency(5 * itl, 9 * itl95)}
    latencies |= {"tpot": latency(6 * tpot, 9 * tpot), "total": latency(300 * total, 600 * total)}
    return level(latencies, 20 * rate)


def rounds(chance: np.random.Generator, count: int, slower: float = 1.0) -> list[list[LevelResult]]:
    """A server in a noisy house: what disturbs a round disturbs all its figures, and each one by itself, too."""
    shared, own = chance.normal(0, 0.02, (count, 1)), chance.normal(0, 0.02, (count, 7))
    factors = slower * np.exp(shared + own) * (1 + 0.3 * (chance.random((count, 1)) < 0.05))
    factors[:, 6] = 1 / factors[:, 6]
    return [[round_of(row)] for row in factors]


@pytest.fixture
def verdicts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals and numbers of rounds decide nothing, and are most of the work."""
    monkeypatch.setattr(ratios, "_bootstrap", lambda _: None)
    monkeypatch.setattr(comparison, "rounds_needed", lambda *_: None)


@pytest.mark.usefixtures("verdicts_only")
@pytest.mark.slow
def test_twins_are_seldom_called_worse() -> None:
    chance, called = np.random.default_rng(7), 0
    for _ in range(100):
        (load,) = compare_rounds(rounds(chance, 6), rounds(chance, 6), 0.05)
        assert len(load.metrics) == len(METRICS)
        called += any(one.verdict == "worse" for one in load.metrics)
    assert called <= 5, "of a hundred families of eight figures"


@pytest.mark.usefixtures("verdicts_only")
def test_a_regression_of_a_tenth_is_found() -> None:
    chance, found = np.random.default_rng(8), 0
    for _ in range(30):
        (load,) = compare_rounds(rounds(chance, 10), rounds(chance, 10, slower=1.1), 0.05)
        verdicts = [one.verdict for one in load.metrics]
        assert "better" not in verdicts
        found += "worse" in verdicts
    assert found >= 27, "of thirty, though one round in ten of either has a third more of everything"


def test_a_difference_is_told_by_its_size_and_interval() -> None:
    chance = np.random.default_rng(8)
    (load,) = compare_rounds(rounds(chance, 40), rounds(chance, 40, slower=1.1), 0.05)
    for one in load.metrics:
        assert one.verdict == "worse"
        assert one.regression == pytest.approx(0.1, abs=0.04)
        assert one.interval is not None
        assert one.interval[0] < one.ratio < one.interval[1]
        assert one.told(0.05) == f"worse by {one.regression:.1%}"
    better = compare_rounds(rounds(chance, 40, slower=1.1), rounds(chance, 40), 0.05)[0].metrics
    assert {one.verdict for one in better} == {"better"}


def test_what_rounds_cannot_show_is_said_with_how_many_could() -> None:
    chance = np.random.default_rng(9)
    (load,) = compare_rounds(rounds(chance, 4), rounds(chance, 4), 0.05)
    for one in load.metrics:
        assert one.rounds_needed is not None
        assert one.rounds_needed > 4
        assert f"{one.rounds_needed} rounds would show 5%" in one.told(0.05)
    (calm,) = compare_rounds([[round_of(np.ones(7))]] * 4, [[round_of(np.ones(7))]] * 4, 0.05)
    assert {one.told(0.05) for one in calm.metrics} == {"no difference; 5% would have been seen"}


@settings(max_examples=15)
@given(st.floats(0.001, 0.3), st.floats(0.01, 0.5), st.integers(1, 24))
def test_more_noise_and_smaller_differences_need_more_rounds(scatter: float, by: float, tests: int) -> None:
    most = 401

    def needed(*given_: float) -> int:
        return rounds_needed(given_[0], given_[1], int(given_[2])) or most

    here = needed(scatter, by, tests)
    assert needed(2 * scatter, by, tests) >= here
    assert needed(scatter, by / 2, tests) >= here
    assert needed(scatter, by, tests + 8) >= here


def test_holm_as_its_author_computes_it() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_figure_that_a_round_lacks_is_left_out_and_named() -> None:
    whole = [[round_of(np.ones(7))]] * 3
    lacking = [*whole[:2], [whole[0][0].model_copy(update={"goodput_per_s": 0.0})]]
    (load,) = compare_rounds(whole, lacking, 0.05)
    assert load.left_out == {"goodput_per_s": "1 of 3 rounds have none"}
    assert len(load.metrics) == len(METRICS) - 1


def run(path: Path, slower: float, chance_seed: int, **changed: object) -> Path:
    """A stored run with the requests of one load."""
    chance = np.random.default_rng(chance_seed)
    samples = {name: (chance.lognormal(3, 0.3, 300) * slower).tolist() for name in ("ttft", "tpot", "total")}
    latencies = {name: Distribution.of([(one,) for one in values]) for name, values in samples.items()}
    found = {name: one for name, one in latencies.items() if one is not None}
    made = BenchResult(
        name="llama", made="2026-11-23T00:00:00+00:00", target={"way": "triton"}, machine={"processors": 2},
        workload={"source": "words at random", "turns": 1}, seed=0, slo={},
        levels=(level(found, 20 / slower, samples),),
    )  # fmt: skip
    made.model_copy(update=changed).write(path)
    return path


def test_two_stored_runs_are_compared_by_their_requests(tmp_path: Path) -> None:
    a, same = run(tmp_path / "a.json", 1.0, 1), run(tmp_path / "same.json", 1.0, 2)
    twins, (load,) = compare_files(a, same, max_regression=0.0), compare_files(a, same).loads
    assert {one.verdict for one in load.metrics if one.p is not None} == {"no difference"}
    assert {one.metric for one in load.metrics if one.p is None} == {"output_tokens_per_s", "goodput_per_s"}
    assert twins.passed
    assert "what the machine did meanwhile is part of every ratio" in twins.warnings[0]
    slow = compare_files(a, run(tmp_path / "slow.json", 1.25, 3), max_regression=0.1)
    assert {one.verdict for one in slow.loads[0].metrics if one.p is not None} == {"worse"}
    assert [(one.budget, one.passed) for one in slow.budgets] == [("max_regression", False)]


def test_runs_that_did_not_ask_the_same_are_refused_with_all_that_differs(tmp_path: Path) -> None:
    a = run(tmp_path / "a.json", 1.0, 1)
    b = run(
        tmp_path / "b.json", 1.0, 1,
        workload={"source": "x.jsonl", "turns": 2}, seed=4, target={"way": "gateway"}, levels=(),
    )  # fmt: skip
    with pytest.raises(InvalidInput) as caught:
        compare_files(a, b)
    assert {fault.key for fault in caught.value.faults} == {
        "workload.source", "workload.turns", "seed", "target.way", "",
    }  # fmt: skip
