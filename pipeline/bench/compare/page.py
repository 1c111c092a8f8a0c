"""A comparison as one HTML file that loads nothing: ratios with their intervals, budgets, answers side by side.

write_compare_page(result, Path("difference.html"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.bench.compare.answers import QuestionResult
from pipeline.bench.compare.figures import LoadComparison, MetricComparison
from pipeline.bench.compare.run import CompareResult
from pipeline.bench.page import render_page
from pipeline.charts import has_matplotlib, inline_svg, svg_text
from pipeline.extras import install_line

_SAME, _WORSE, _BETTER = "#6b7785", "#c0392b", "#1a7f4b"
_THEMED = {_SAME: "var(--soft)", _WORSE: "var(--bad)", _BETTER: "var(--good)"}
_COLORS = {"worse": _WORSE, "better": _BETTER}


@dataclass(frozen=True, slots=True)
class MarkedText:
    """An answer in parts, each with whether the other answer has it, too."""

    parts: tuple[tuple[str, bool], ...]


def write_compare_page(result: CompareResult, path: Path) -> None:
    """Write a comparison as an HTML page; the file is replaced."""
    path.write_text(compare_page(result), encoding="utf-8")


def compare_page(result: CompareResult) -> str:
    """Render the page of a comparison."""
    drawn = has_matplotlib()
    answers = result.answers
    tone, sentence = _verdict(result)
    return render_page(
        "compare.html.j2",
        result=result,
        tone=tone,
        verdict=sentence,
        loads=[(load, _picture(load, at) if drawn else "") for at, load in enumerate(result.loads)],
        differing=[]
        if answers is None
        else [(question, *marked(question)) for question in answers.questions if not question.equal],
        equal=[] if answers is None else [question for question in answers.questions if question.equal],
        no_pictures="" if drawn else f"The pictures need matplotlib: {install_line('bench')}",
    )


def marked(question: QuestionResult) -> tuple[MarkedText, MarkedText]:
    """Split both answers into parts that the other has and parts that it lacks, word by word."""
    words = _words(question.a), _words(question.b)
    shared: tuple[list[bool], list[bool]] = ([False] * len(words[0]), [False] * len(words[1]))
    for block in SequenceMatcher(None, words[0], words[1], autojunk=False).get_matching_blocks():
        shared[0][block.a : block.a + block.size] = [True] * block.size
        shared[1][block.b : block.b + block.size] = [True] * block.size
    first, second = (
        MarkedText(
            tuple(
                ("".join(word for word, _ in run), both)
                for both, run in groupby(zip(text, flags, strict=True), key=lambda pair: pair[1])
            )
        )
        for text, flags in zip(words, shared, strict=True)
    )
    return first, second


def _words(text: str) -> list[str]:
    """Split a text into words and the white space between them."""
    return ["".join(run) for _, run in groupby(text, key=str.isspace)]


def _verdict(result: CompareResult) -> tuple[str, str]:
    """Tone (good, bad, mixed or none) and sentence of the verdict."""
    parts = list(_findings(result))
    for state, heading in (("over", "Over budget"), ("not shown", "Not shown to be kept")):
        if named := [budget.budget for budget in result.budgets if budget.state == state]:
            parts.append(f"{heading}: {', '.join(named)}.")
    worse = any(metric.verdict == "worse" for load in result.loads for metric in load.metrics)
    tone = {"over": "bad", "not shown": "mixed"}.get(result.state, "mixed" if worse else "good")
    return tone if result.budgets or worse else "none", " ".join(parts)


def _findings(result: CompareResult) -> Iterator[str]:
    for load in result.loads:
        verdicts = {
            verdict: [
                f"{metric.title} ({abs(metric.regression):.1%})"
                for metric in load.metrics
                if metric.verdict == verdict
            ]
            for verdict in ("worse", "better")
        }
        clauses = [f"{verdict} in {', '.join(names)}" for verdict, names in verdicts.items() if names]
        yield f"With {load.load}, B is {' and '.join(clauses) if clauses else 'not different from A beyond the noise'}."
    if (answers := result.answers) is not None:
        right_a, right_b = answers.right
        yield (
            f"Of {len(answers.questions)} answers {answers.equal} are equal and {answers.similar} similar; "
            f"A has {right_a} right, and B {right_b}."
        )


def _picture(load: LoadComparison, number: int) -> str:
    """Draw the ratios of all figures, with their intervals."""
    shown = [metric for metric in load.metrics if metric.ratio > 0]
    if not shown:
        return ""
    alt = "B/A: " + "; ".join(
        f"{metric.title} {metric.ratio:.3f}"
        + (f" ({metric.interval[0]:.3f} to {metric.interval[1]:.3f})" if metric.interval else "")
        for metric in shown
    )
    return svg_text(inline_svg(_drawing(shown), f"ratios-{number}", alt, colors=_THEMED))


def _drawing(shown: list[MetricComparison]) -> Callable[[], Any]:
    def draw() -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 0.5 + 0.36 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for place, metric in enumerate(reversed(shown)):
            color = _COLORS.get(metric.verdict, _SAME)
            for a, b in metric.rounds:
                axes.plot(100 * (b / a - 1), place, marker="|", markersize=9, color=color, alpha=0.5)
            if metric.interval is not None:
                ends = [100 * (value - 1) for value in metric.interval]
                axes.plot(ends, (place, place), color=color, linewidth=2.4, solid_capstyle="butt")
            axes.plot(100 * (metric.ratio - 1), place, marker="o", markersize=6, color=color)
        axes.axvline(0, color=_SAME, linewidth=1, linestyle=(0, (4, 2)))
        axes.set_yticks(range(len(shown)), [metric.title for metric in reversed(shown)])
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlabel("B against A, %")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        return figure

    return draw
