"""The gate: figures held against the budgets of the recipe, and the report that each judgement leaves.

Judged are the files that the recipe's runtime loads, and those that were exported besides; all must be within the
budgets. The figures are an artifact and do not depend on the budgets, so a changed budget is judged in no time. The
report (report.json and report.html, under `reports/` in the store) has the verdict, the figures, the spread of the KL
divergence and the worst positions. The page is one file: its style and its picture are inside, and it needs no script
and no network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from pipeline.errors import GateFailed
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.stages.evaluate.metrics import EvaluationMetrics, KlHistogram, read_metrics
from pipeline.stages.evaluate.verdict import GateVerdict, judge
from pipeline.store import Artifact, Store, digest_of

_WIDTH, _HEIGHT = 760, 200  # of the picture, in its own units


def write_report(metrics: Sequence[EvaluationMetrics], verdict: GateVerdict, directory: Path) -> None:
    """Write report.json and report.html into `directory`, which is made if need be.

    The files that the runtime loads come first. Nothing is written where the report says the same already.

    Args:
        metrics: figures of each export, those of the files that the runtime loads first.
        verdict: the judgement of these figures.
        directory: the folder of the report.
    """
    directory.mkdir(parents=True, exist_ok=True)
    content = {"verdict": verdict.to_json(), "metrics": [one.to_json() for one in metrics]}
    text = json.dumps(content, ensure_ascii=False, indent=1, sort_keys=True) + "\n"
    page, data = directory / "report.html", directory / "report.json"
    if page.is_file() and data.is_file() and data.read_text(encoding="utf-8") == text:
        return
    page.write_text(render(metrics, verdict), encoding="utf-8")
    data.write_text(text, encoding="utf-8")


def render(metrics: Sequence[EvaluationMetrics], verdict: GateVerdict) -> str:
    """Render report.html."""
    import jinja2

    source = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(source).render(
        exports=metrics, verdict=verdict, bars=bars, width=_WIDTH, height=_HEIGHT
    )


def bars(histogram: KlHistogram) -> list[dict[str, float | int | str]]:
    """Lay out a histogram, one bar a bin.

    Returns:
        x, y, width, height and middle in the units of the picture (760 x 200), label of the axis, and title.
    """
    top = max((*histogram.counts, 1))
    step = _WIDTH / max(len(histogram.counts), 1)
    drawn: list[dict[str, float | int | str]] = []
    for index, count in enumerate(histogram.counts):
        tall = _HEIGHT * count / top
        low, high = histogram.edges[index], histogram.edges[index + 1]
        drawn.append(
            {
                "x": round(index * step + 1, 2),
                "y": round(_HEIGHT - tall, 2),
                "width": round(step - 2, 2),
                "height": round(tall, 2),
                "middle": round((index + 0.5) * step, 2),
                "label": f"{low:.0e}" if index % 4 == 0 else "",
                "title": f"{count} positions between {low:.1e} and {high:.1e} nats",
            }
        )
    return drawn


def hold_to_gate(recipe: Recipe, evaluation: Artifact, store: Store, progress: Progress) -> None:
    """Judge an evaluation by the budgets of a recipe, write the report, and say the figures of each export.

    Args:
        evaluation: Artifact of the step `evaluate`.

    Raises:
        GateFailed: A budget is exceeded; the message has the figures, what to try, and where the report is.
    """
    metrics = read_metrics(evaluation.path)
    verdict = judge(metrics, recipe.quantization.gate)
    report = report_folder(store, recipe, evaluation)
    try:
        write_report(metrics, verdict, report)
        kept = str(report / "report.html")
    except OSError as error:
        # A store that is only read, or a full disk; the verdict holds without the report.
        kept = f"cannot be written: {error.strerror}"
    if not verdict.passed:
        raise GateFailed(f"recipe {recipe.name}: {verdict}\nreport: {kept}")
    loaded = f", which {recipe.runtime.kind} loads"
    for files, figures in verdict.summary.items():
        progress.say(f"    gate: {files}{loaded if files == metrics[0].files else ''}: {figures}")
    progress.say(f"    report: {kept}")


def report_folder(store: Store, recipe: Recipe, evaluation: Artifact) -> Path:
    """The folder of the store for what the gate of a recipe says of an evaluation."""
    gate = None if recipe.quantization.gate is None else recipe.quantization.gate.model_dump(mode="json")
    judged = digest_of({"evaluation": evaluation.digest, "gate": gate})
    return store.reports / f"{recipe.name}-{judged[:12]}"
