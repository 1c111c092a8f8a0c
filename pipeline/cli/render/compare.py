"""Output of `pipeline compare`: a table of figures for each load, the answers, budgets, warnings."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipeline.bench.compare.answers import AnswerComparison, QuestionResult
from pipeline.bench.compare.figures import LoadComparison
from pipeline.bench.compare.run import CompareResult
from pipeline.cli.output import cut

_COLORS = {
    "better": "green", "worse": "red", "longer": "yellow", "shorter": "yellow", "no difference": "default",
    "unknown": "dim",
}  # fmt: skip
_STATES = {"kept": "[green]kept[/]     ", "over": "[red]OVER[/]     ", "not shown": "[yellow]not shown[/]"}
_DIFFERING, _EXCERPT = 5, 100


def compare_lines(result: CompareResult) -> Iterator[RenderableType]:
    """Yield the lines and tables of a comparison."""
    yield Text(f"A: {result.a.name}, {result.a.given}\nB: {result.b.name}, {result.b.given}")
    for load in result.loads:
        yield _table(result, load)
        for name, why in load.left_out.items():
            yield Text(f"{name} is not compared: {why}", style="dim")
    if result.answers is not None:
        yield from (Text(line) for line in _answers(result.answers))
    for budget in result.budgets:
        yield Text.from_markup(f"{_STATES[budget.state]}  {budget.budget}: {escape(budget.text)}")
    for warning in result.warnings:
        yield Text.from_markup(f"[yellow]warning:[/] {escape(warning)}")


def _table(result: CompareResult, load: LoadComparison) -> Table:
    rounds = f", {result.rounds} rounds of each" if result.rounds else ""
    by_turns = ", each started anew for its turns" if result.by_turns else ""
    counts = f"{load.requests[0]:,} and {load.requests[1]:,} requests"
    table = Table(
        box=SIMPLE, pad_edge=False, title=f"{load.load}: {counts}{rounds}{by_turns}", title_justify="left"
    )
    for heading in ("", "A", "B", "", "B/A", "95 % interval"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    table.add_column("verdict")
    for metric in load.metrics:
        span = "-" if metric.interval is None else f"{metric.interval[0]:.3f} to {metric.interval[1]:.3f}"
        verdict = f"[{_COLORS[metric.verdict]}]{escape(metric.sentence(result.threshold))}[/]"
        table.add_row(
            metric.title,
            _figure(metric.a),
            _figure(metric.b),
            metric.unit,
            f"{metric.ratio:.3f}",
            span,
            verdict,
        )
    return table


def _answers(answers: AnswerComparison) -> Iterator[str]:
    count, (right_a, right_b) = len(answers.questions), answers.right
    yield (
        f"answers to {count} golden questions: {answers.equal} equal, {answers.similar} similar; "
        f"right by their checks: A {right_a}, B {right_b}"
    )
    if (perplexity := answers.perplexity) is not None:
        yield (
            f"perplexity of the answers of A: {perplexity.a_of_a:.4g} by A, {perplexity.b_of_a:.4g} by B "
            f"({perplexity.increase:+.2%}); of those of B: {perplexity.b_of_b:.4g} by B, {perplexity.a_of_b:.4g} by A"
        )
    elif answers.no_perplexity:
        yield f"perplexity is not known: {answers.no_perplexity}"
    if answers.judge:
        judged = answers.judged
        yield (
            f"judged by {answers.judge}: {judged['a']} for A, {judged['b']} for B, {judged['tie']} ties, "
            f"{judged['none']} without a verdict"
        )
    differing = [question for question in answers.questions if not question.equal]
    for result in differing[:_DIFFERING]:
        yield from _difference(result)
    if len(differing) > _DIFFERING:
        yield f"  and {len(differing) - _DIFFERING} more that differ: --output FILE has them all"


def _difference(question: QuestionResult) -> Iterator[str]:
    place = "" if question.first_difference is None else f", from token {question.first_difference}"
    yield f"  {question.question[:_EXCERPT]!r}: {question.similarity:.0%} alike{place}"
    for name, text, fault in (("A", question.a, question.fault_a), ("B", question.b, question.fault_b)):
        yield f"    {name}: {cut(text, _EXCERPT)!r}" + (f" (wrong: {fault})" if fault else "")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
