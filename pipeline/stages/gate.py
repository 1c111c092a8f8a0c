"""The gate: the figures of `evaluate` held against the budgets of the recipe.

Judged are the files that the recipe's runtime loads, and those that were exported besides; all must be within the
budgets. The figures are an artifact and do not depend on the budgets, so a changed budget is judged in no time. Each
judgement leaves a report (JSON and HTML) under `reports/` in the store, whether it passed or not.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import GateFailed
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.stages.evaluate import judge, read_metrics, write_report
from pipeline.store import Artifact, Store


def hold_to_gate(recipe: Recipe, evaluation: Artifact, store: Store, progress: Progress) -> None:
    """Say the figures of each export, those of the files that the runtime loads first, and keep the report.

    Raises:
        GateFailed: a budget is exceeded; the message has the figures, what to try, and where the report is.
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
    """Where the report of this evaluation is kept."""
    return store.root / "reports" / f"{recipe.name}-{evaluation.digest[:12]}"
