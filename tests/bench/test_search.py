"""Searches whose optimum is known: found, resumed, held to the SLO, and never building what the plan refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.bench.load_settings import Load
from pipeline.bench.result import BenchResult
from pipeline.bench.tune.conclusion import conclude
from pipeline.bench.tune.objective import Score, TrialRecord
from pipeline.bench.tune.race import spent
from pipeline.bench.tune.report import TuneReport, best_of
from pipeline.bench.tune.search import SearchOptions, search, trial_name
from pipeline.bench.tune.search_space import SearchSpace, Settings, search_space
from pipeline.bench.tune.settings import Objective
from pipeline.bench.tune.study import TuneStudy, open_study
from pipeline.bench.tune.surrogate import Observation, propose
from pipeline.errors import ServerError, UserError
from pipeline.recipe import Recipe, load_recipe
from pipeline.store import Store
from tests.support.tuning import Fake, FakeRunner, FakeServed, level, result

KEYS = ("limits.max_concurrency", "limits.max_batch_tokens", "kv_cache.reuse", "draft.max_draft_tokens")
LOADS = (Load("concurrency", 16), Load("concurrency", 4))


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("tiny-cpu")


@pytest.fixture(scope="module")
def space(recipe: Recipe) -> SearchSpace:
    return search_space(recipe, KEYS)


@contextmanager
def study_of(
    folder: Path, space: SearchSpace, objectives: Sequence[Objective] = ("throughput",), seed: int = 0
) -> Iterator[TuneStudy]:
    with open_study(Store(folder), "tiny-cpu", {}, space, objectives, seed=seed) as study:
        yield study


def hill(settings: Settings, _: Load) -> Fake:
    """Best at two drafted tokens, eight requests at a time, with reuse: 105 of 41 to 105."""
    length, concurrency = settings["draft.max_draft_tokens"], settings["limits.max_concurrency"]
    assert isinstance(length, int)
    assert isinstance(concurrency, int)
    return Fake(100 - 7 * abs(length - 2) - abs(concurrency - 8) / 4 + 5 * bool(settings["kv_cache.reuse"]))


def ignore(_: object) -> None: ...


@pytest.mark.parametrize("planned", [False, True])
def test_proposals_lead_to_the_best_settings_and_are_those_of_their_seed(
    planned: bool, space: SearchSpace
) -> None:
    """A plan that knows the order of settings leads there sooner."""

    def worth(settings: Settings) -> float:
        return hill(settings, LOADS[0]).tokens_per_s

    def run(trials: int) -> list[Settings]:
        tried = [space.own]
        known = [
            {**space.own, dimension.key: value}
            for dimension in space.dimensions
            for value in dimension.values
        ]
        forecasts = [(settings, worth(settings)) for settings in known] if planned else []
        while len(tried) < trials:
            made = [Observation(settings, math.log(worth(settings))) for settings in tried]
            chosen = propose(
                space, made, forecasts, lambda settings: settings not in tried, f"0/{len(tried)}"
            )
            assert chosen is not None
            tried.append(chosen)
        return tried

    tried = run(6 if planned else 12)
    assert max(map(worth, tried)) >= 102
    assert tried == run(len(tried))


@pytest.mark.slow
def test_the_optimum_is_found_within_the_trials(space: SearchSpace, tmp_path: Path) -> None:
    runner = FakeRunner(hill)
    with study_of(tmp_path, space) as study:
        records = search(study, runner, SearchOptions(LOADS, trials=12), ignore)
    best = best_of(records, ("throughput",))
    assert best is not None
    assert best.values["throughput"] >= 103
    assert records[0].settings == space.own
    assert len(runner.served) == 12
    assert len({tuple(sorted(space.overrides(settings))) for settings in runner.served}) == 12


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_as_if_nothing_had_happened(
    space: SearchSpace, tmp_path: Path
) -> None:
    options, dies_after = SearchOptions(LOADS, trials=6), 5
    with study_of(tmp_path / "whole", space) as study:
        whole = search(study, FakeRunner(hill), options, ignore)
    with pytest.raises(KeyboardInterrupt), study_of(tmp_path / "cut", space) as study:
        search(study, FakeRunner(hill, dies_after=dies_after), options, ignore)
    second = FakeRunner(hill)
    with study_of(tmp_path / "cut", space) as study:
        assert len(study.planned()) == 1
        cut = search(study, second, options, ignore)
    assert [without_clock(record) for record in cut] == [without_clock(record) for record in whole]
    assert len(second.served) == 6 - dies_after


def without_clock(record: TrialRecord) -> TrialRecord:
    return record.model_copy(update={"seconds": {}})


def test_figures_that_were_kept_before_a_kill_are_not_measured_again(
    space: SearchSpace, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt), study_of(tmp_path, space) as study:
        search(study, FakeRunner(hill, dies_after=2), SearchOptions(LOADS, trials=3), ignore)
    runner = FakeRunner(hill)
    with study_of(tmp_path, space) as study:
        (pending,) = study.planned()
        study.keep(trial_name(pending.number), result("tiny-cpu", [level(LOADS[0], Fake(77.0))]))
        records = search(study, runner, SearchOptions(LOADS, trials=3), ignore)
    assert runner.served == []
    assert records[-1].values == {"throughput": 77.0}


def test_a_trial_behind_the_best_in_its_first_seconds_is_stopped_and_costs_less(
    space: SearchSpace, tmp_path: Path
) -> None:
    """First seconds bring nine tenths of a whole load here; starting takes no time: a stopped trial costs a tenth."""

    class Cold(FakeServed):
        def bench(self, load: Load, *, first_seconds: bool = False) -> BenchResult:
            fake = hill(self.settings, load)
            self.seconds = {"load": 1.0 if first_seconds else 10.0}
            if not first_seconds:
                return super().bench(load)
            return result("tiny-cpu", [level(load, Fake(0.9 * fake.tokens_per_s))])

    class ColdRunner(FakeRunner):
        @contextmanager
        def serve(self, settings: Settings) -> Iterator[FakeServed]:
            with super().serve(settings):
                yield Cold(self, settings)

    runner, options = ColdRunner(hill), SearchOptions(LOADS, trials=6)
    with study_of(tmp_path, space) as study:
        records = search(study, runner, options, ignore)
    stopped = [record for record in records if record.outcome == "stopped"]
    whole = [record for record in records if record.outcome == "measured"]
    assert len(whole) + len(stopped) == len(records) == len(runner.served) > 6
    assert stopped
    assert "behind the best" in stopped[0].reason
    best = max(record.values["throughput"] for record in whole)
    assert all(hill(record.settings, LOADS[0]).tokens_per_s < best for record in stopped)
    assert all(record.first_tokens_per_s is not None and not record.values for record in stopped)
    assert 5.5 < spent(records) <= 6.5
    with study_of(tmp_path, space) as study:
        assert search(study, ColdRunner(hill), options, ignore) == records


def test_a_load_counts_as_held_where_half_of_the_whole_trials_hold_it_or_a_larger_one(
    space: SearchSpace, tmp_path: Path
) -> None:
    with study_of(tmp_path, space) as study:
        for load, missed in ((LOADS[0], 0.0), (LOADS[1], 0.0), (LOADS[1], 0.5), (LOADS[0], 0.0)):
            assert not study.most_hold(LOADS)
            trial = study.next()
            assert trial is not None
            figures = Score(values={"throughput": 10.0}, violations={"itl_p95_ms": missed}, load=str(load))
            study.finish(trial.number, "measured", score=figures)
        assert study.most_hold(LOADS[:1])
        assert study.most_hold(LOADS)
        assert not study.most_hold(LOADS[1:])


@pytest.mark.parametrize("objectives", [("latency",), ("throughput", "latency")])
def test_latencies_are_not_judged_by_first_seconds(
    objectives: tuple[Objective, ...], space: SearchSpace, tmp_path: Path
) -> None:
    with study_of(tmp_path, space, objectives) as study:
        records = search(study, FakeRunner(hill), SearchOptions(LOADS, trials=5), ignore)
        assert study.race() is None
    assert [record.outcome for record in records] == ["measured"] * 5


def test_a_search_can_be_prolonged(space: SearchSpace, tmp_path: Path) -> None:
    with study_of(tmp_path, space) as study:
        search(study, FakeRunner(hill), SearchOptions(LOADS, trials=1), ignore)
    more = FakeRunner(hill)
    with study_of(tmp_path, space) as study:
        records = search(study, more, SearchOptions(LOADS, trials=2), ignore)
    assert (len(more.served), len(records)) == (1, 2)


def test_what_the_plan_refuses_is_never_served_and_counts_as_no_trial(
    space: SearchSpace, tmp_path: Path
) -> None:
    runner = FakeRunner(
        hill, refuses=lambda settings: "no room" if settings["limits.max_concurrency"] != 16 else ""
    )
    with study_of(tmp_path, space) as study:
        records = search(study, runner, SearchOptions(LOADS, trials=4), ignore)
    assert len(runner.served) == 4
    assert all(settings["limits.max_concurrency"] == 16 for settings in runner.served)
    refused = [record for record in records if record.outcome == "refused"]
    assert refused
    assert {record.reason for record in refused} == {"no room"}


@pytest.mark.slow
def test_the_best_is_within_the_slo_and_smaller_loads_are_tried_for_it(
    space: SearchSpace, tmp_path: Path
) -> None:
    """More drafted tokens bring more, and beyond three they break the SLO at 16 requests at a time, but not at 4."""

    def does(settings: Settings, load: Load) -> Fake:
        length = settings["draft.max_draft_tokens"]
        assert isinstance(length, int)
        broken = length > 3 and load.value == 16
        return Fake((100 if load.value == 16 else 30) + 10 * length, 60.0 if broken else 20.0)

    runner = FakeRunner(does)
    with study_of(tmp_path, space) as study:
        records = search(study, runner, SearchOptions(LOADS, trials=16), ignore)
    best = best_of(records, ("throughput",))
    assert best is not None
    assert (best.settings["draft.max_draft_tokens"], best.load) == (3, "16 at a time")
    lengths = {record.number: record.settings["draft.max_draft_tokens"] for record in records}
    at_four = [record for record in records if record.load == "4 at a time"]
    assert at_four
    assert all(lengths[record.number] in (4, 5, 6, 8) for record in at_four)


def test_a_load_that_is_hopeless_in_its_first_seconds_is_left(space: SearchSpace, tmp_path: Path) -> None:
    runner = FakeRunner(lambda _, load: Fake(50.0, 400.0 if load.value == 16 else 20.0))
    with study_of(tmp_path, space) as study:
        records = search(study, runner, SearchOptions(LOADS, trials=2), ignore)
    assert {load.value for _, load in runner.measured} == {4}
    assert [record.outcome for record in records] == ["measured"] * 2


def test_where_all_loads_are_hopeless_a_trial_is_stopped_and_nothing_is_recommended(
    recipe: Recipe, space: SearchSpace, tmp_path: Path
) -> None:
    runner, options = FakeRunner(lambda *_: Fake(50.0, 400.0)), SearchOptions(LOADS, trials=2)
    with study_of(tmp_path, space) as study:
        records = search(study, runner, options, ignore)
        report = conclude(study, recipe, options, pairs=2, runner=runner, say=ignore)
    assert runner.measured == []
    assert [record.outcome for record in records] == ["stopped"] * 2
    assert "8.0 times itl_p95_ms" in records[0].reason
    assert report.recommendation.verdict == "keep"


def test_a_trial_that_does_not_serve_is_written_down_and_the_search_goes_on(
    space: SearchSpace, tmp_path: Path
) -> None:
    class Failing(FakeRunner):
        @contextmanager
        def serve(self, settings: Settings) -> Iterator[object]:  # type: ignore[override]
            if settings["kv_cache.reuse"]:
                raise ServerError("out of memory")
            with super().serve(settings) as served:
                yield served

    with study_of(tmp_path, space) as study:
        records = search(study, Failing(hill), SearchOptions(LOADS, trials=4), ignore)
    failed = [record.outcome == "failed" for record in records]
    assert failed == [bool(record.settings["kv_cache.reuse"]) for record in records]
    assert set(failed) == {True, False}
    assert len(records) == 4


def test_the_best_forecasts_of_the_plan_are_tried_after_the_recipe(
    space: SearchSpace, tmp_path: Path
) -> None:
    runner = FakeRunner(hill, forecasts=lambda settings: hill(settings, LOADS[0]).tokens_per_s)
    with study_of(tmp_path, space) as study:
        records = search(study, runner, SearchOptions(LOADS, trials=3), ignore)
    assert [record.origin for record in records] == ["recipe", "forecast", "forecast"]
    assert min(record.values["throughput"] for record in records[1:]) > records[0].values["throughput"]


def test_two_searches_for_one_answer_do_not_run_at_once(space: SearchSpace, tmp_path: Path) -> None:
    with (
        study_of(tmp_path, space),
        pytest.raises(UserError, match="works on this search"),
        study_of(tmp_path, space),
    ):
        pass
    with study_of(tmp_path, space), study_of(tmp_path, space, seed=1):
        pass


@pytest.mark.slow
def test_several_objectives_give_a_front(recipe: Recipe, space: SearchSpace, tmp_path: Path) -> None:
    """Concurrency buys goodput with latency: neither end of it beats the other."""

    def does(settings: Settings, _: Load) -> Fake:
        concurrency = settings["limits.max_concurrency"]
        assert isinstance(concurrency, int)
        return Fake(1000.0 / concurrency, itl_ms=20.0)

    options = SearchOptions(LOADS[:1], trials=10)
    with study_of(tmp_path, space, ("throughput", "latency")) as study:
        search(study, FakeRunner(does), options, ignore)
        report = conclude(study, recipe, options, pairs=0, runner=None, say=ignore)
    best = max(trial.values["throughput"] for trial in report.trials)
    assert {trial.values["throughput"] for trial in report.trials if trial.number in report.front} == {best}
    assert report.recommendation.verdict in ("none yet", "keep")


# The rounds at the end


def drifting(settings: Settings, gain: float) -> Callable[[Settings, Load], Fake]:
    """These settings are better by so much, on a machine that slows down all the time."""
    asked = 0

    def does(changed: Settings, _: Load) -> Fake:
        nonlocal asked
        asked += 1
        speed = 100.0 * 0.99**asked
        return Fake(speed * (1 + gain) if changed == settings else speed)

    return does


@pytest.mark.parametrize(("gain", "verdict"), [(0.3, "tuned"), (0.0, "keep")])
def test_what_was_found_is_recommended_only_if_rounds_show_it_again(
    gain: float, verdict: str, recipe: Recipe, space: SearchSpace, tmp_path: Path
) -> None:
    """The search was lucky with one trial; the rounds say what it is worth."""
    options = SearchOptions(LOADS[:1], trials=5)
    with study_of(tmp_path, space) as study:
        records = search(study, FakeRunner(hill), options, ignore)
        best = best_of(records, ("throughput",))
        assert best is not None
        assert space.overrides(best.settings)
        runner = FakeRunner(drifting(best.settings, gain))
        report = conclude(study, recipe, options, pairs=4, runner=runner, say=ignore)
        again = conclude(study, recipe, options, pairs=4, runner=None, say=ignore)
    assert report.recommendation.verdict == verdict, report.recommendation
    assert report.recommendation.interval is not None
    low, high = report.recommendation.interval
    assert low <= gain <= high
    # A B B A A B B A, and not measured again.
    sides = ["best" if settings == best.settings else "own" for settings in runner.served]
    assert sides == ["own", "best", "best", "own"] * 2
    assert again.recommendation == report.recommendation


@pytest.mark.parametrize(("worth", "length"), [(9.0, 3), (-9.0, 0)])
def test_a_search_for_a_draft_length_recommends_one_or_none(
    worth: float, length: int, recipe: Recipe, tmp_path: Path
) -> None:
    space = search_space(recipe, ["draft.max_draft_tokens"])
    options = SearchOptions(LOADS[:1])

    def does(settings: Settings, _: Load) -> Fake:
        drafted = settings["draft.max_draft_tokens"]
        assert isinstance(drafted, int)
        return Fake(100 + worth * (5 - abs(drafted - 3)) if drafted else 100.0, acceptance=0.8)

    runner = FakeRunner(does)
    with study_of(tmp_path, space) as study:
        records = search(study, runner, options, ignore)
        assert sorted(str(record.settings["draft.max_draft_tokens"]) for record in records) == list(
            "01234568"
        )
        report: TuneReport = conclude(study, recipe, options, pairs=3, runner=runner, say=ignore)
    advice = report.recommendation
    assert advice.verdict == "tuned"
    assert advice.changes == ("draft=null",) if length == 0 else (f"draft.max_draft_tokens={length}",)
    assert {load.acceptance for trial in report.trials for load in trial.loads} == {0.8}
    assert advice.interval is not None
