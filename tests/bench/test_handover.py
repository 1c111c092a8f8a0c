"""Trials that another machine measures: the script is run, with a stand-in for `pipeline`, and its figures adopted."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from pipeline.bench.lengths import Lengths
from pipeline.bench.load_settings import Load, LoadSettings
from pipeline.bench.tune.conclusion import conclude, write_tuned
from pipeline.bench.tune.handover import hand_over, take_results
from pipeline.bench.tune.search import SearchOptions
from pipeline.bench.tune.search_space import SearchSpace, search_space
from pipeline.bench.tune.study import TuneStudy, open_study
from pipeline.errors import InvalidInput, UserError
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.catalog import sibling_file
from pipeline.store import Store
from tests.support.tuning import Fake, FakeRunner, level, result

LOADS = (Load("concurrency", 4),)
LOAD = LoadSettings(concurrency=(4,), prompt_tokens=Lengths(64), duration_s=5.0, seed=3)
# Writes what it is called with; `bench` copies figures, `serve` fails for one of the values.
STAND_IN = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$1 $*" in
    serve*max_concurrency=64*) echo "out of memory" >&2; exit 1 ;;
    bench*) while [ "$1" != --output ]; do shift; done; cp "$FIGURES" "$2"; exit 3 ;;
esac
"""


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("tiny-cpu")


@pytest.fixture
def space(recipe: Recipe) -> SearchSpace:
    return search_space(recipe, ["limits.max_concurrency"])


def run_script(script: Path, into: Path, figures: Path) -> list[str]:
    """Run it with the stand-in on PATH, and give what that was called with."""
    programs = into / "bin"
    programs.mkdir(exist_ok=True)
    stand_in = programs / "pipeline"
    stand_in.write_text(STAND_IN, encoding="utf-8")
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    calls = into / "calls"
    calls.unlink(missing_ok=True)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls)}
    environment["FIGURES"] = str(figures)
    subprocess.run([script], cwd=into, env=environment, check=True, timeout=60, capture_output=True)
    return calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []


def no_runner() -> FakeRunner:
    def never(*_: object) -> Fake:
        raise AssertionError("nothing is served here")

    return FakeRunner(never)


@pytest.mark.slow
def test_trials_go_to_another_machine_and_their_figures_come_back(
    recipe: Recipe, space: SearchSpace, tmp_path: Path
) -> None:
    options = SearchOptions(LOADS, trials=5, ahead=True)
    figures, results = tmp_path / "figures.json", tmp_path / "tiny-cpu-tune"
    result("tiny-cpu", [level(LOADS[0], Fake(100.0))]).write(figures)
    with open_study(Store(tmp_path), "tiny-cpu", {}, space, ("throughput",), seed=0) as study:
        handed = hand_over(study, no_runner(), recipe, options, LOAD, pairs=3)
        assert handed is not None
        assert handed.names == tuple(f"trial-{trial.number:03d}" for trial in study.planned())
        assert {trial.settings["limits.max_concurrency"] for trial in study.planned()} == {4, 8, 16, 32, 64}
        # Asked again, the script is of the same trials.
        assert hand_over(study, no_runner(), recipe, options, LOAD, pairs=3) == handed

        calls = run_script(handed.path, tmp_path, figures)
        benches = [call for call in calls if call.startswith("bench")]
        assert len(benches) == 4
        assert "--load concurrency=4 --load prompt_tokens=64 --load duration_s=5 --load seed=3" in benches[0]
        assert sum(call.startswith("serve") for call in calls) == 5
        assert calls.count("stop tiny-cpu") == 5
        assert load_recipe(results / "recipe.yaml").limits == recipe.limits
        # What has figures is not measured again; what did not serve is tried again.
        assert [call.split()[0] for call in run_script(handed.path, tmp_path, figures)] == ["serve", "stop"]

        give(results, study)
        taken = take_results(study, results, recipe, options, pairs=3)
        assert sorted(taken) == sorted(handed.names)
        outcomes = {record.settings["limits.max_concurrency"]: record for record in study.records()}
        assert outcomes[64].outcome == "failed"
        assert outcomes[64].reason == "out of memory"
        assert outcomes[8].values == {"throughput": 130.0}
        advice = conclude(study, recipe, options, pairs=3, runner=None, say=print).recommendation
        assert advice.verdict == "none yet"

        rounds = hand_over(study, no_runner(), recipe, options, LOAD, pairs=3)
        assert rounds is not None
        assert len(rounds.names) == 6
        run_script(rounds.path, tmp_path, figures)
        better(results, study, rounds.names)
        take_results(study, results, recipe, options, pairs=3)
        assert hand_over(study, no_runner(), recipe, options, LOAD, pairs=3) is None
        report = conclude(study, recipe, options, pairs=3, runner=None, say=print)
    assert report.recommendation.verdict == "tuned", report.recommendation
    assert report.recommendation.changes == ("limits.max_concurrency=8",)

    file = tmp_path / "tuned.yaml"
    assert write_tuned(recipe, report, file, force=False).tuned_recipe == str(file)
    tuned, text = load_recipe(file), file.read_text(encoding="utf-8")
    assert tuned.limits.max_concurrency == 8
    assert tuned.model_copy(update={"limits": recipe.limits}) == recipe
    assert "(was 16)" in text
    assert "throughput +30.0%" in text
    with pytest.raises(UserError, match="--force"):
        write_tuned(recipe, report, file, force=False)
    assert sibling_file(recipe, "tuned") == Path("tiny-cpu-tuned.yaml").absolute()


def give(results: Path, study: TuneStudy) -> None:
    """Figures of each trial: eight requests at a time are best."""
    for trial in study.planned():
        speed = 130.0 if trial.settings["limits.max_concurrency"] == 8 else 100.0
        file = results / f"trial-{trial.number:03d}.json"
        if file.exists():
            result("tiny-cpu", [level(LOADS[0], Fake(speed))]).write(file)


def better(results: Path, study: TuneStudy, names: tuple[str, ...]) -> None:
    """Figures of the rounds, which say the same."""
    own = study.settings_digest(study.space.own)[:8]
    for number, name in enumerate(names):
        speed = (100.0 if own in name else 130.0) * 0.99 ** (number // 2)
        result("tiny-cpu", [level(LOADS[0], Fake(speed))]).write(results / f"{name}.json")


def test_figures_of_something_else_are_refused_all_at_once(
    recipe: Recipe, space: SearchSpace, tmp_path: Path
) -> None:
    options, folder = SearchOptions(LOADS, trials=3, ahead=True), tmp_path / "came"
    folder.mkdir()
    with open_study(Store(tmp_path), "tiny-cpu", {}, space, ("throughput",), seed=0) as study:
        handed = hand_over(study, no_runner(), recipe, options, LOAD, pairs=0)
        assert handed is not None
        with pytest.raises(UserError, match="has no figures that this search waits for"):
            take_results(study, folder, recipe, options, pairs=0)
        result("other", [level(LOADS[0], Fake(1.0))]).write(folder / f"{handed.names[0]}.json")
        result("tiny-cpu", [level(Load("rate", 2), Fake(1.0))]).write(folder / f"{handed.names[1]}.json")
        (folder / f"{handed.names[2]}.json").write_text("{}")
        with pytest.raises(InvalidInput) as caught:
            take_results(study, folder, recipe, options, pairs=0)
        assert len(caught.value.faults) == 3
        assert len(study.planned()) == 3
