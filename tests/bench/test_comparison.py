"""A regression told from noise: by simulation with known differences, and by what two stored runs allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.bench.compare import figures as comparison
from pipeline.bench.compare.budgets import load_budgets
from pipeline.bench.compare.figures import METRICS, compare_rounds
from pipeline.bench.compare.page import compare_page
from pipeline.bench.compare.run import compare_files
from pipeline.bench.compare.settings import CompareCriteria
from pipeline.bench.load_settings import Load
from pipeline.bench.result import BenchResult, Distribution, Generator, LevelResult
from pipeline.bench.statistics import holm, rounds_needed, share_difference
from pipeline.errors import InvalidInput
from tests.support.benched import level as level_of
from tests.support.benched import result, usual

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
    """Numbers of rounds decide nothing, and are most of the work."""
    monkeypatch.setattr(comparison, "rounds_needed", lambda *_: None)


@pytest.mark.usefixtures("verdicts_only")
@pytest.mark.slow
def test_twins_are_seldom_called_worse() -> None:
    chance, called = np.random.default_rng(7), 0
    for _ in range(100):
        (load,) = compare_rounds(rounds(chance, 6), rounds(chance, 6), 0.05)
        assert len(load.metrics) == len(METRICS) - 1, "these answers have no length"
        called += any(metric.verdict == "worse" for metric in load.metrics)
    assert called <= 5, "of a hundred families of eight figures"


@pytest.mark.usefixtures("verdicts_only")
def test_a_regression_of_a_tenth_is_found() -> None:
    chance, found = np.random.default_rng(8), 0
    for _ in range(30):
        (load,) = compare_rounds(rounds(chance, 10), rounds(chance, 10, slower=1.1), 0.05)
        verdicts = [metric.verdict for metric in load.metrics]
        assert "better" not in verdicts
        found += "worse" in verdicts
    assert found >= 27, "of thirty, though one round in ten of either has a third more of everything"


def test_a_difference_is_told_by_its_size_and_interval() -> None:
    chance = np.random.default_rng(8)
    (load,) = compare_rounds(rounds(chance, 40), rounds(chance, 40, slower=1.1), 0.05)
    for metric in load.metrics:
        assert metric.verdict == "worse"
        assert metric.regression == pytest.approx(0.1, abs=0.04)
        assert metric.interval is not None
        assert metric.interval[0] < metric.ratio < metric.interval[1]
        assert metric.sentence(0.05) == f"worse by {metric.regression:.1%}"
    better = compare_rounds(rounds(chance, 40, slower=1.1), rounds(chance, 40), 0.05)[0].metrics
    assert {metric.verdict for metric in better} == {"better"}


def test_what_rounds_cannot_show_is_said_with_how_many_could() -> None:
    chance = np.random.default_rng(9)
    (load,) = compare_rounds(rounds(chance, 4), rounds(chance, 4), 0.05)
    for metric in load.metrics:
        assert metric.rounds_needed is not None
        assert metric.rounds_needed > 4
        assert f"{metric.rounds_needed} rounds would show 5%" in metric.sentence(0.05)
    (calm,) = compare_rounds([[round_of(np.ones(7))]] * 4, [[round_of(np.ones(7))]] * 4, 0.05)
    assert {metric.sentence(0.05) for metric in calm.metrics} == {"no difference; 5% would have been seen"}


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
    lacking = [*whole[:2], [whole[0][0].model_copy(update={"goodput_per_s": None})]]
    (load,) = compare_rounds(whole, lacking, 0.05)
    assert load.left_out == {"goodput_per_s": "1 of 3 rounds have none"}
    assert len(load.metrics) == len(METRICS) - 2


def judged(
    a: Sequence[Sequence[LevelResult]], b: Sequence[Sequence[LevelResult]], **criteria: Any
) -> dict[str, str]:
    loads = compare_rounds(a, b, 0.05)
    return {budget.budget: budget.state for budget in load_budgets(loads, CompareCriteria(**criteria))}


@pytest.mark.usefixtures("verdicts_only")
@pytest.mark.parametrize(
    ("slower", "rounds_", "limit", "state"),
    [
        (1.0, 12, 0.1, "kept"),
        (1.2, 12, 0.1, "over"),
        (1.1, 12, 0.1, "not shown"),
        (1.0, 12, 0.0, "not shown"),
    ],
)
def test_a_budget_is_kept_over_or_not_shown(slower: float, rounds_: int, limit: float, state: str) -> None:
    chance = np.random.default_rng(3)
    a, b = rounds(chance, rounds_), rounds(chance, rounds_, slower=slower)
    assert judged(a, b, max_regression=limit) == {"max_regression": state}


@pytest.mark.usefixtures("verdicts_only")
def test_a_budget_that_is_just_used_up_is_seldom_called_over_or_kept() -> None:
    chance, states = np.random.default_rng(5), Counter[str]()
    for _ in range(40):
        a, b = rounds(chance, 8), rounds(chance, 8, slower=1.05)
        states.update(judged(a, b, max_regression=0.05).values())
    assert states["over"] <= 4
    assert states["kept"] <= 2


@pytest.mark.usefixtures("verdicts_only")
def test_a_server_that_does_nothing_any_more_is_over_budget() -> None:
    a = rounds(np.random.default_rng(5), 6)
    dead = [[level.model_copy(update={"goodput_per_s": 0.0})] for (level,) in a]
    assert judged(a, dead, max_regression=0.5) == {"max_regression": "over"}
    lacking = [[level.model_copy(update={"goodput_per_s": None})] for (level,) in a]
    assert judged(a, lacking, max_regression=0.5) == {"max_regression": "not shown"}


@pytest.mark.usefixtures("verdicts_only")
def test_failures_and_lengths_are_judged_with_speed() -> None:
    """An answer that fails or ends early is fast; what is not asked for is named only where it is over."""
    a = [
        [level.model_copy(update={"output_tokens_mean": 64.0})]
        for (level,) in rounds(np.random.default_rng(6), 8)
    ]
    failing = {"complete": 80, "left": 0, "refused": 20, "failed": 0, "abandoned": 0}
    b = [[level.model_copy(update={"requests": failing, "output_tokens_mean": 50.0})] for (level,) in a]
    assert judged(a, a, max_regression=0.1) == {"max_regression": "kept"}
    assert judged(a, b, max_regression=0.1) == {
        "max_regression": "kept", "max_length_change": "over", "max_more_failed": "over",
    }  # fmt: skip
    assert judged(a, b, max_length_change=0.3, max_more_failed=0.5) == {
        "max_length_change": "kept", "max_more_failed": "kept",
    }  # fmt: skip
    assert judged(a, a, max_more_failed=0.001) == {"max_more_failed": "not shown"}


def test_more_looks_make_a_budget_harder_to_decide() -> None:
    assert CompareCriteria(rounds=6).looks == CompareCriteria(rounds=6, most_rounds=6).looks == 1
    assert CompareCriteria(rounds=6, most_rounds=24).looks == 3
    assert CompareCriteria(rounds=6, most_rounds=20).looks == 3


@given(st.integers(0, 30), st.integers(1, 300), st.integers(0, 30), st.integers(1, 300))
def test_the_interval_of_two_shares_holds_their_difference(a: int, of_a: int, b: int, of_b: int) -> None:
    a, b = min(a, of_a), min(b, of_b)
    low, high = share_difference((a, of_a), (b, of_b))
    assert -1 - 1e-9 <= low <= b / of_b - a / of_a <= high <= 1 + 1e-9
    mirrored = share_difference((b, of_b), (a, of_a))
    assert mirrored == pytest.approx((-high, -low))


def stored(
    path: Path,
    noise: int,
    *,
    slower: float = 1.0,
    gaps: float = 1.0,
    seconds: float = 30.0,
    **changed: object,
) -> Path:
    """A stored run of eight requests at a time."""

    def speed(batch: int) -> tuple[float, float]:
        first_ms, gap_ms = usual(batch)
        return slower * first_ms, slower * gaps * gap_ms

    measured = level_of(Load("concurrency", 8), speed, spread=0.3, seed=noise, seconds=seconds)
    result([measured]).model_copy(update=changed).write(path)
    return path


def test_two_stored_runs_are_compared_by_windows_of_time(tmp_path: Path) -> None:
    limit = CompareCriteria(max_regression=0.1)
    a, same = stored(tmp_path / "a.json", 2), stored(tmp_path / "same.json", 3)
    twins = compare_files(a, same, limit)
    assert {metric.verdict for metric in twins.loads[0].metrics} == {"no difference"}
    assert "what the machine did meanwhile is part of every ratio" in twins.warnings[0]
    slow = compare_files(a, stored(tmp_path / "slow.json", 4, slower=1.25), limit)
    verdicts = {metric.metric: metric.verdict for metric in slow.loads[0].metrics}
    assert {verdicts[name] for name in ("tpot_p50", "itl_p95", "output_tokens_per_s")} == {"worse"}
    assert slow.state == "over"
    assert all(f"{metric.title} {metric.ratio:.3f}" in compare_page(slow) for metric in slow.loads[0].metrics)
    long = [stored(tmp_path / f"{seed}.json", seed, seconds=600) for seed in (5, 6)]
    assert compare_files(*long, limit).state == "kept"


def test_no_loss_of_a_stored_run_passes_for_want_of_values(tmp_path: Path) -> None:
    """Gaps five times as long, a quarter of the tokens: neither has single requests to compare."""
    limit, path = CompareCriteria(max_regression=0.5), stored(tmp_path / "a.json", 2)
    before = BenchResult.read(path)
    (level,) = before.levels
    quarter = [
        window.model_copy(update={"output_tokens_per_s": window.output_tokens_per_s / 4})
        for window in level.timeline
    ]
    fewer = level.model_copy(
        update={"output_tokens_per_s": level.output_tokens_per_s / 4, "timeline": tuple(quarter)}
    )
    longer = level.latencies["itl"].model_copy(update={"p50": 5 * level.latencies["itl"].p50})
    # Bins of 1/32 of a doubling: five times as long is 74 bins further.
    moved = [
        window.model_copy(update={"itl_counts": {at + 74: count for at, count in window.itl_counts.items()}})
        for window in level.timeline
    ]
    slower = level.model_copy(
        update={"latencies": {**level.latencies, "itl": longer}, "timeline": tuple(moved)}
    )
    unkept = level.model_copy(update={"timeline": (), "samples": {}})
    for level_, state, named in (
        (fewer, "over", "output tokens"), (slower, "over", "ITL p50"), (unkept, "not shown", "not known: TTFT p50"),
    ):  # fmt: skip
        other = tmp_path / f"{named}.json"
        before.model_copy(update={"levels": (level_,)}).write(other)
        budget = next(budget for budget in compare_files(path, other, limit).budgets)
        assert (budget.budget, budget.state) == ("max_regression", state)
        assert named in budget.text


def test_runs_that_did_not_ask_the_same_are_refused_with_all_that_differs(tmp_path: Path) -> None:
    a = stored(tmp_path / "a.json", 1)
    workload = {"source": "x.jsonl", "turns": 2, "prompt_tokens": "512", "answer_tokens": "64"}
    changed = {"workload": workload, "seed": 4, "target": {"way": "gateway"}, "levels": ()}
    b = stored(tmp_path / "b.json", 1, **changed)
    with pytest.raises(InvalidInput) as caught:
        compare_files(a, b, CompareCriteria())
    assert {fault.key for fault in caught.value.faults} == {
        "workload.source", "workload.turns", "seed", "target.way", "",
    }  # fmt: skip
