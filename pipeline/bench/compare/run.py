"""Two deployments beside each other, from their sources to one result.

    a, b = RunningSource(record, …), PackageSource(Path("package"), …)
    result = compare_deployments(a, b, CompareSettings(), Silent())

Rounds go A B B A A B B A …: what changes slowly on a machine changes both alike. Packages are served by this process,
beside each other where two fit, and else by turns: each is started anew for its part of the rounds.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.bench.compare.answers import AnswerComparison, AnswerStudy, answer_checks
from pipeline.bench.compare.budgets import BudgetResult, BudgetState, load_budgets, worst_state
from pipeline.bench.compare.figures import LoadComparison, Side, compare_rounds, compare_runs
from pipeline.bench.compare.judge import Judge
from pipeline.bench.compare.settings import CompareCriteria, CompareSettings
from pipeline.bench.compare.sources import ComparedDeployment, DeploymentSource, PackageSource
from pipeline.bench.load_settings import section_argv
from pipeline.bench.result import BenchResult, LevelResult, ResultDocument, Section
from pipeline.bench.run import run_bench
from pipeline.bench.statistics import LEAST_ROUNDS
from pipeline.golden import BudgetCheck, GoldenSet
from pipeline.prepare.second_server import memory_beside
from pipeline.progress import Progress, Silent
from pipeline.store import Store
from pipeline.triton.deployment import Deployment

_SEEDS = 1000  # between two rounds: a load of a round takes one
_CUT_SHORT = "Ctrl-C ended it early: answers were not compared, and no budget was checked"
_MOST_FAILED = 0.01  # by which B may fail more often than A without a warning


class ComparedSide(Section):
    """One of the two."""

    name: str = Field(description="Name of the deployment.")
    given: str = Field(description="Name as on the command line.")
    made: str = Field(default="", description="Time of a stored run.")
    target: dict[str, Any] = Field(description="way, url, model, package digest, runtime, versions.")


class CompareResult(ResultDocument):
    """Result of `pipeline compare`."""

    schema_version: Literal["pipeline.compare/1"] = Field(default="pipeline.compare/1", alias="schema")
    made: str = Field(description="Time of the comparison: ISO 8601, UTC.")
    a: ComparedSide
    b: ComparedSide
    rounds: int = Field(
        description="Rounds of A and B each; 0 for stored runs, or where only answers were compared."
    )
    interrupted: bool = Field(
        default=False, description="Whether Ctrl-C ended it: it has fewer rounds, and no budget was checked."
    )
    by_turns: bool = Field(description="Whether each package was started anew for its part of the rounds.")
    threshold: float = Field(description="Relative difference that `rounds_needed` would show.")
    loads: tuple[LoadComparison, ...]
    answers: AnswerComparison | None
    budgets: tuple[BudgetResult, ...]
    warnings: tuple[str, ...] = Field(description="Reasons to mistrust it.")

    @property
    def state(self) -> BudgetState:
        """State of all budgets together."""
        return worst_state(self.budgets)


def compare_deployments(
    a: DeploymentSource,
    b: DeploymentSource,
    settings: CompareSettings,
    progress: Progress,
    *,
    golden: GoldenSet | None = None,
    judge: Judge | None = None,
) -> CompareResult:
    """Put the same load on two deployments in turns, and ask both the golden questions.

    Args:
        golden: Questions, and budgets of their answers; None asks none.
        judge: Model that judges answers; None for none.

    Raises:
        ServerError: One of them does not start, or does not answer.
        InvalidInput: The file of prompts has faults.
        KeyboardInterrupt: Ctrl-C came before both had three rounds. What was started has ended.
    """
    criteria = settings.criteria
    run = _Comparison({"a": a, "b": b}, settings, golden, progress)
    interrupted = False
    with ExitStack() as stack:
        run.open(stack)
        try:
            run.rounds(lambda: _undecided(run, criteria))
        except KeyboardInterrupt:
            interrupted = True
            if run.complete_rounds < LEAST_ROUNDS:
                raise
    rounds, comparison = run.complete_rounds, run.comparison()
    answers, checks = None, list[BudgetCheck]()
    if run.study is not None and golden is not None and not interrupted:
        answers = asyncio.run(run.study.result(judge))
        checks += answer_checks(run.study.comparison, answers, golden.budgets, criteria.max_lost)
    return CompareResult(
        made=_now(),
        a=_side(a, run.deployments["a"]),
        b=_side(b, run.deployments["b"]),
        rounds=rounds,
        interrupted=interrupted,
        by_turns=run.by_turns,
        threshold=criteria.threshold,
        loads=comparison,
        answers=answers,
        budgets=()
        if interrupted
        else (
            *map(BudgetResult.of_answers, checks),
            *(load_budgets(comparison, criteria, criteria.looks) if comparison else ()),
        ),
        warnings=(*run.warnings(), *_warnings(comparison), *([_CUT_SHORT] if interrupted else ())),
    )


def _undecided(run: _Comparison, criteria: CompareCriteria) -> bool:
    """Whether a budget needs more rounds."""
    return worst_state([*load_budgets(run.comparison(), criteria, criteria.looks)]) == "not shown"


def compare_files(a: Path, b: Path, criteria: CompareCriteria) -> CompareResult:
    """Compare two results of `pipeline bench --output`.

    Raises:
        InvalidInput: One is no such result, or their workloads differ.
    """
    runs = [BenchResult.read(path) for path in (a, b)]
    comparison = compare_runs(*runs)
    side_a, side_b = (
        ComparedSide(name=run.name, given=str(path), made=run.made, target=run.target)
        for run, path in zip(runs, (a, b), strict=True)
    )
    apart = "they were measured one after the other, so what the machine did meanwhile is part of every ratio"
    warnings = [f"{apart}: two running deployments or two packages are compared in turns"]
    if runs[0].machine != runs[1].machine:
        warnings.append("they were measured from different machines, or with different versions")
    return CompareResult(
        made=_now(),
        a=side_a,
        b=side_b,
        rounds=0,
        by_turns=False,
        threshold=criteria.threshold,
        loads=comparison,
        answers=None,
        budgets=tuple(load_budgets(comparison, criteria)),
        warnings=(*warnings, *_warnings(comparison)),
    )


def comparison_plan(
    a: DeploymentSource, b: DeploymentSource, settings: CompareSettings, golden: GoldenSet | None
) -> dict[str, Any]:
    """List what a comparison would do, and how long the loads take."""
    load, rounds = settings.load, settings.criteria.rounds
    takes = "as long as the requests take"
    if load.period_s is not None:
        takes = f"{2 * rounds * len(load.loads) * (load.period_s + load.uncounted_s):.0f} s of load"
    return {
        **{
            name: source.given if source.package is None else f"{source.given}, from {source.package}"
            for name, source in (("a", a), ("b", b))
        },
        "rounds": f"{rounds} of each, in turns: A B B A"
        + (
            f"; up to {settings.criteria.most_rounds} while a budget is open"
            if settings.criteria.most_rounds
            else ""
        ),
        "loads": ", then ".join(map(str, load.loads)),
        "questions": len(golden.questions) if golden else 0,
        "judge": settings.criteria.judge_model or "none",
        "takes": takes,
        "again": shlex.join(
            [
                *("pipeline", "compare", a.given, b.given, *section_argv("--load", load)),
                *section_argv("--criteria", settings.criteria),
            ]
        ),
    }


_Visit = tuple[Side, int | None]  # who is asked, and for which round; None for the golden questions


def _turns(done: int, rounds: int) -> list[_Visit]:
    """List the visits of rounds that are not done yet, in turns: A B B A."""
    turns: list[Side] = ["a", "b", "b", "a"]
    return [(turns[at % 4], at // 2) for at in range(2 * done, 2 * rounds)]


@dataclass
class _Comparison:
    """Two deployments while they are measured."""

    sources: dict[Side, DeploymentSource]
    settings: CompareSettings
    golden: GoldenSet | None
    progress: Progress
    by_turns: bool = False
    levels: dict[Side, list[Sequence[LevelResult]]] = field(default_factory=lambda: {"a": [], "b": []})
    deployments: dict[Side, ComparedDeployment] = field(default_factory=dict)
    _up: dict[Side, ComparedDeployment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.study = (
            None if self.golden is None else AnswerStudy(self.golden, timeout_s=self.settings.load.timeout_s)
        )

    @property
    def complete_rounds(self) -> int:
        """Rounds that both sides have."""
        return min(len(levels) for levels in self.levels.values())

    def open(self, stack: ExitStack) -> None:
        """Start both, where that does not make one slower than it would be alone."""
        packages = [source.package for source in self.sources.values() if isinstance(source, PackageSource)]
        self.by_turns = bool(packages) and (self.settings.criteria.by_turns or not _fit(packages))
        for side, source in self.sources.items():
            if not (self.by_turns and isinstance(source, PackageSource)):
                self._up[side] = stack.enter_context(self._started(side, source))

    def comparison(self) -> tuple[LoadComparison, ...]:
        """Compare the rounds that both sides have."""
        rounds = self.complete_rounds
        if not rounds:
            return ()
        a, b = (self.levels[side][:rounds] for side in ("a", "b"))
        return compare_rounds(a, b, self.settings.criteria.threshold)

    def rounds(self, undecided: Callable[[], bool]) -> None:
        """Measure the rounds, and ask the golden questions.

        Args:
            undecided: Tells after the rounds whether a budget needs more of them.
        """
        criteria = self.settings.criteria
        # The first visit asks the questions; a later one has each score the other's answers.
        first: list[_Visit] = [("a", None)] if self.study is not None else []
        self._visit([*first, *_turns(0, criteria.rounds)])
        done = criteria.rounds
        while done < (criteria.most_rounds or 0) and undecided():
            more = min(2 * done, criteria.most_rounds or 0)
            self._visit(_turns(done, more))
            done = more
        if self.study is not None:
            self._visit([("b", None), ("a", None)])

    def _visit(self, schedule: Sequence[_Visit]) -> None:
        for side, visits in groupby(schedule, key=lambda visit: visit[0]):
            planned = [number for _, number in visits]
            if planned == [None] and self.study is not None and self.study.complete:
                continue
            with self._reached(side) as deployment:
                self.deployments[side] = deployment
                if self.study is not None:
                    with self.progress.task(f"golden questions, {side.upper()}"):
                        asyncio.run(self.study.visit(side, deployment))
                for number in planned:
                    if number is not None:
                        self._measure(side, number, deployment)

    def _measure(self, side: Side, number: int, deployment: ComparedDeployment) -> None:
        load = self.settings.load
        load = load.model_copy(update={"seed": load.seed + _SEEDS * number})
        with self.progress.task(f"round {number + 1} of {self.settings.criteria.rounds}, {side.upper()}"):
            result = run_bench(deployment.subject, load, Silent())
        if any(level.interrupted for level in result.levels):
            raise KeyboardInterrupt
        # A round is compared by its figures; its requests would fill the memory.
        self.levels[side].append(
            [level.model_copy(update={"samples": {}, "timeline": ()}) for level in result.levels]
        )

    @contextmanager
    def _reached(self, side: Side) -> Iterator[ComparedDeployment]:
        if side in self._up:
            yield self._up[side]
            return
        with self._started(side, self.sources[side]) as deployment:
            yield deployment

    @contextmanager
    def _started(self, side: Side, source: DeploymentSource) -> Iterator[ComparedDeployment]:
        if isinstance(source, PackageSource):
            self.progress.say(f"starting {side.upper()} from {source.given}")
        with source.up() as deployment:
            yield deployment

    def warnings(self) -> Iterator[str]:
        """Yield what makes the two hard to compare."""
        a, b = (self.deployments[side].subject.about for side in ("a", "b"))
        if "package" in a and a["package"] == b.get("package"):
            yield "both are the same package: what differs is noise, or where they run"
        for side, levels in self.levels.items():
            limited = [
                level.generator for round_levels in levels for level in round_levels if level.generator.limits
            ]
            if limited:
                worst = max(limited, key=lambda generator: generator.late_p99_ms)
                yield (
                    f"{side.upper()}: the load generator itself may be the limit in {len(limited)} of "
                    f"{sum(map(len, levels))} measurements; at worst, {worst.limits}"
                )


def _fit(packages: Sequence[Path]) -> bool:
    """Whether packages can be served beside each other. On GPUs the second would get less KV cache than the first."""
    if any(Deployment.load(package).requirements is not None for package in packages):
        return len(packages) == 1
    needs = [memory_beside(package, None, Store.at(None)) for package in packages]
    return sum(need.needed_bytes for need in needs) <= min(need.free_bytes for need in needs)


def _side(source: DeploymentSource, deployment: ComparedDeployment) -> ComparedSide:
    return ComparedSide(name=deployment.subject.name, given=source.given, target=deployment.subject.described)


def _warnings(loads: Sequence[LoadComparison]) -> Iterator[str]:
    for load in loads:
        a, b = (bad / max(1, count) for bad, count in zip(load.failed, load.requests, strict=True))
        if b - a > _MOST_FAILED:
            failed = f"with {load.load}, B failed {b:.1%} of its requests, and A {a:.1%}"
            yield f"{failed}: what was refused is in no latency"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
