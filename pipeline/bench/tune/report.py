"""Report of a search: trials, costs and the recommendation, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field

from pipeline.bench.load_settings import Load
from pipeline.bench.result import BenchResult, LevelResult, ResultDocument, Section
from pipeline.bench.tune.objective import Confirmation, TrialRecord, maximized
from pipeline.bench.tune.search import trial_name
from pipeline.bench.tune.search_space import SearchSpace, Value
from pipeline.bench.tune.settings import Objective
from pipeline.bench.tune.study import TuneStudy
from pipeline.recipe import Recipe

_FEW = 0.02  # gain below which a change is not worth a rollout


class TrialFigures(Section):
    """Figures of one trial under one load."""

    load: str
    output_tokens_per_s: float
    goodput_per_s: float | None
    ttft_p95_ms: float | None
    itl_p95_ms: float | None
    total_p95_ms: float | None
    acceptance: float | None = Field(description="Share of the draft's tokens that were accepted.")
    within_slo: bool

    @classmethod
    def of(cls, level: LevelResult) -> TrialFigures:
        """Take the figures from a measurement."""
        return cls(
            load=str(level.load),
            output_tokens_per_s=level.output_tokens_per_s,
            goodput_per_s=level.goodput_per_s,
            ttft_p95_ms=level.p95("ttft"),
            itl_p95_ms=level.p95("itl"),
            total_p95_ms=level.p95("total"),
            acceptance=level.acceptance,
            within_slo=level.within_slo,
        )


class TrialReport(TrialRecord):
    """One trial with its figures."""

    changes: tuple[str, ...] = Field(description="Changes of the recipe, as --set takes them.")
    loads: tuple[TrialFigures, ...] = ()

    @property
    def decisive(self) -> TrialFigures | None:
        """Figures of the load that the values belong to."""
        return next((figures for figures in self.loads if figures.load == self.load), None)


class Recommendation(Section):
    """Advice of a search."""

    verdict: Literal["tuned", "keep", "none yet"]
    trial: int | None = Field(default=None, description="Trial that is recommended, or was nearest to it.")
    changes: tuple[str, ...] = ()
    gain: float | None = Field(default=None, description="Gain in the first objective; 0.1 is 10 % better.")
    interval: tuple[float, float] | None = Field(default=None, description="95 % interval of the gain.")
    rounds: int = Field(default=0, description="Pairs of interleaved rounds behind the gain.")
    reason: str


class TuneReport(ResultDocument):
    """One search: JSON of `pipeline tune`."""

    schema_version: Literal["pipeline.tune/1"] = Field(default="pipeline.tune/1", alias="schema")
    recipe: str
    made: str = Field(description="Time of the report: ISO 8601, UTC.")
    objectives: tuple[Objective, ...]
    slo: dict[str, float]
    machine: dict[str, Any]
    workload: dict[str, Any]
    keys: dict[str, tuple[Value, ...]] = Field(description="Key -> values that were tried.")
    reasons: dict[str, str] = Field(description="Key -> why it matters.")
    left_out: dict[str, str] = Field(description="Keys that were not tried, and why.")
    folder: str = Field(description="Folder of the study, with the figures of each trial.")
    seconds: dict[str, float] = Field(description="Seconds of all trials: build, serve, measure.")
    engines: int = Field(description="Trials that an engine was built for.")
    trials: tuple[TrialReport, ...]
    front: tuple[int, ...] = Field(
        description="Trials that no other beats in all objectives; with one objective, in throughput and latency."
    )
    recommendation: Recommendation
    tuned_recipe: str | None = Field(default=None, description="File that was written.")


def best_of(trials: Sequence[TrialRecord], objectives: Sequence[Objective]) -> TrialRecord | None:
    """Choose the trial within the SLO that is best in the first objective; the earliest of equals."""
    feasible = [trial for trial in trials if trial.feasible]
    if not feasible:
        return None
    sign = 1.0 if maximized(objectives[0]) else -1.0
    return max(feasible, key=lambda trial: (sign * trial.values[objectives[0]], -trial.number))


def recommend(
    trials: Sequence[TrialRecord],
    space: SearchSpace,
    objectives: Sequence[Objective],
    confirmation: Confirmation | None,
) -> Recommendation:
    """Recommend the best trial, or to keep the recipe as it is, with the reason."""
    best = best_of(trials, objectives)
    if best is None:
        return _nothing_feasible(trials, space)
    changes = space.overrides(best.settings)
    if not changes:
        reason = f"no other trial within the SLO had a better {objectives[0]}"
        return Recommendation(verdict="keep", trial=best.number, reason=reason)
    if confirmation is None:
        return Recommendation(
            verdict="none yet",
            trial=best.number,
            changes=changes,
            reason="the best trial was not measured against the recipe in rounds of their own",
        )
    gain, text = confirmation.gain, _gain_text(confirmation, objectives[0])
    verdict: Literal["tuned", "keep"] = "keep"
    if not confirmation.best_feasible:
        missed = sorted(
            {name for score in confirmation.best for name, by in score.violations.items() if by > 0}
        )
        reason = f"measured again, trial {best.number} missed {', '.join(missed)}"
    elif not confirmation.other_feasible:
        verdict, reason = "tuned", f"it meets the SLO in all rounds, which the recipe does not; {text}"
    elif not gain.clear:
        reason = f"{text}: too near to no gain to tell from noise"
    elif gain.mean < _FEW:
        reason = f"{text}: too little to be worth a change"
    else:
        verdict, reason = "tuned", text
    return Recommendation(
        verdict=verdict,
        trial=best.number,
        changes=changes,
        gain=round(gain.mean, 4),
        interval=None if gain.interval is None else (round(gain.interval[0], 4), round(gain.interval[1], 4)),
        rounds=len(confirmation.best),
        reason=reason,
    )


def recommend_length(
    lengths: Mapping[int, TrialRecord],
    confirmation: Confirmation | None,
    own: Value,
    objectives: Sequence[Objective],
    acceptance: float | None,
) -> Recommendation:
    """Recommend a draft length, or none, with the reason.

    Args:
        lengths: Length -> trial within the SLO; 0 is without a draft.
        acceptance: Share of the best length's tokens that were accepted.
    """
    drafted = best_of([trial for length, trial in lengths.items() if length], objectives)
    if drafted is None:
        return Recommendation(verdict="keep", reason="no draft length was measured within the SLO")
    length = next(number for number, trial in lengths.items() if trial is drafted)
    if confirmation is None:
        verdict: Literal["tuned", "keep"] = "keep" if length == own else "tuned"
        reason = f"{length} tokens were best of those that were tried; no draft was not among them"
        return Recommendation(verdict=verdict, trial=drafted.number, reason=reason)
    pays = confirmation.best_feasible and (confirmation.gain.clear or not confirmation.other_feasible)
    accepted = "" if acceptance is None else f", {acceptance:.0%} of them accepted"
    gain = f"{length} tokens{accepted}: {_gain_text(confirmation, objectives[0])} over no draft"
    chosen = length if pays else 0
    trial = drafted if pays else lengths.get(0, drafted)
    return Recommendation(
        verdict="keep" if chosen == own else "tuned",
        trial=trial.number,
        gain=round(confirmation.gain.mean, 4),
        interval=confirmation.gain.interval,
        rounds=len(confirmation.best),
        reason=gain if pays else f"no draft: the best length gains nothing that is clear ({gain})",
    )


def _gain_text(confirmation: Confirmation, objective: Objective) -> str:
    """ "goodput +12.3 % (9.1 to 15.6 % at 95 %, 3 pairs of rounds)"."""
    gain = confirmation.gain
    text = f"{objective} {gain.mean:+.1%}{' better' if objective == 'latency' else ''}"
    pairs = len(confirmation.best)
    rounds = "one pair of rounds" if pairs == 1 else f"{pairs} pairs of rounds"
    if gain.interval is None:
        return f"{text} ({rounds})"
    return f"{text} ({gain.interval[0]:+.1%} to {gain.interval[1]:+.1%} at 95 %, {rounds})"


def _nothing_feasible(trials: Sequence[TrialRecord], space: SearchSpace) -> Recommendation:
    measured = [trial for trial in trials if trial.outcome == "measured"]
    if not measured:
        return Recommendation(verdict="keep", reason="no trial was measured to its end")
    nearest = min(measured, key=lambda trial: sum(by for by in trial.violations.values() if by > 0))
    missed = ", ".join(f"{name} by {by:.0%}" for name, by in nearest.violations.items() if by > 0)
    return Recommendation(
        verdict="keep",
        trial=nearest.number,
        changes=space.overrides(nearest.settings),
        reason=f"no trial met the SLO; trial {nearest.number} was nearest, and missed {missed}",
    )


def make_report(
    study: TuneStudy, recipe: Recipe, recommendation: Recommendation, loads: Sequence[Load]
) -> TuneReport:
    """Gather the trials of a study, with their figures."""
    records = study.records()
    results = {record.number: study.measurement(trial_name(record.number)) for record in records}
    first: BenchResult | None = next((result for result in results.values() if result is not None), None)
    seconds: dict[str, float] = {}
    for record in records:
        for part, value in record.seconds.items():
            seconds[part] = round(seconds.get(part, 0.0) + value, 2)
    trials = tuple(_trial(record, results[record.number], study) for record in records)
    return TuneReport(
        recipe=recipe.name,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        objectives=study.objectives,
        slo=recipe.slo.model_dump(exclude_none=True),
        machine={} if first is None else first.machine,
        workload={**({} if first is None else first.workload), "loads": [str(load) for load in loads]},
        keys={dimension.key: dimension.values for dimension in study.space.dimensions},
        reasons={dimension.key: dimension.reason for dimension in study.space.dimensions},
        left_out=dict(study.space.left_out),
        folder=str(study.folder),
        seconds=seconds,
        engines=sum(record.compiled for record in records),
        trials=trials,
        front=front(trials, study.objectives),
        recommendation=recommendation,
    )


def front(trials: Sequence[TrialReport], objectives: Sequence[Objective]) -> tuple[int, ...]:
    """Numbers of the trials that no other beats: in all objectives, or with one in throughput and whole requests."""

    def goodness(trial: TrialReport) -> tuple[float, ...] | None:
        if len(objectives) > 1 and trial.values:
            return tuple(
                trial.values[name] if maximized(name) else -trial.values[name] for name in objectives
            )
        at = trial.decisive
        if at is None or at.total_p95_ms is None:
            return None
        return at.output_tokens_per_s, -at.total_p95_ms

    known = {
        trial.number: values
        for trial in trials
        if trial.outcome == "measured" and (values := goodness(trial))
    }
    return tuple(
        number
        for number, values in known.items()
        if not any(
            others != values and all(other >= own for other, own in zip(others, values, strict=True))
            for others in known.values()
        )
    )


def _trial(record: TrialRecord, result: BenchResult | None, study: TuneStudy) -> TrialReport:
    levels = () if result is None else result.levels
    return TrialReport(
        **{**dict(record), "violations": {name: round(by, 4) for name, by in record.violations.items()}},
        changes=study.space.overrides(record.settings),
        loads=tuple(TrialFigures.of(level) for level in levels),
    )
