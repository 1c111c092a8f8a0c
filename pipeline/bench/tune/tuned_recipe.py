"""The tuned recipe: the recipe's own file with the recommended changes, and the evidence as comments."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.bench.tune.report import TrialReport, TuneReport
from pipeline.bench.tune.search_space import Value, variant
from pipeline.documents import apply_overrides, read_document
from pipeline.recipe import Recipe, packaged
from pipeline.recipe.catalog import annotated_yaml, write_recipe
from pipeline.recipe.validators import RecipeValues

# Keys whose values may be paths, relative to the recipe's folder.
_PATHS = (
    ("model", "source"),
    ("draft", "source"),
    ("quantization", "calibration", "dataset"),
    ("golden", "file"),
)


def tuned_file(recipe: Recipe) -> Path:
    """Choose the file of the tuned recipe: beside the old one, or in this folder for a packaged recipe."""
    file = recipe.provenance.file
    name = f"{recipe.name if file is None else file.stem}-tuned.yaml"
    if file is None or packaged().get(file.stem) == file:
        return Path(name).absolute()
    return file.with_name(name)


def tuned_recipe(recipe: Recipe, report: TuneReport, folder: Path) -> str:
    """Write the recipe with the recommended changes, and the evidence as comments.

    Args:
        recipe: The recipe as it is.
        report: Report with a recommendation to change something.
        folder: Folder of the tuned recipe; in that of the recipe, paths stay relative.
    """
    advice, own = report.recommendation, RecipeValues(recipe.model_dump(mode="json"))
    trial = next(one for one in report.trials if one.number == advice.trial)
    reasons = {}
    for change in advice.changes:
        key = change.partition("=")[0]
        # Without drafts, their section is gone.
        named = next((one for one in report.keys if one == key or one.startswith(f"{key}.")), key)
        reasons[key] = f"{report.reasons.get(named, '')} (was {_written(own[named])})"
    return annotated_yaml(_head(recipe, report, trial), _values(recipe, advice.changes, folder), reasons)


def _values(recipe: Recipe, changes: Sequence[str], folder: Path) -> dict[str, Any]:
    """Values of the recipe's file, with the changes."""
    file, whole = recipe.provenance.file, variant(recipe, changes).model_dump(mode="json")
    if file is None:
        return whole
    document = read_document(file.read_bytes(), str(file))
    apply_overrides(document, (*recipe.provenance.overrides, *changes))
    if folder.resolve() != file.parent.resolve():
        for section, *path in _PATHS:
            _make_absolute(document.data.get(section), whole.get(section), path)
    return document.data


def _make_absolute(given: Any, whole: Any, path: Sequence[str]) -> None:
    if isinstance(given, dict) and path[0] in given:
        if len(path) == 1:
            given[path[0]] = whole[path[0]]
        else:
            _make_absolute(given[path[0]], whole[path[0]], path[1:])


def _written(value: Value) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _head(recipe: Recipe, report: TuneReport, trial: TrialReport) -> list[str]:
    command = shlex.join(("pipeline", "tune", *recipe.words))
    advice, machine, at = report.recommendation, report.machine, trial.decisive
    lines = [
        f"{recipe.name}, tuned for {' and '.join(report.objectives)} by {command} on {report.made[:10]}.",
        f"Measured on {machine.get('system', 'a machine')} with {machine.get('processors', '?')} processors; "
        f"loads: {', '.join(report.workload['loads'])}; prompts: {report.workload.get('source', '?')}.",
        f"{len(report.trials)} trials; {advice.reason}.",
    ]
    if at is not None:
        figures = [f"{at.output_tokens_per_s:g} tokens/s"]
        figures += [f"TTFT p95 {at.ttft_p95_ms:g} ms"] if at.ttft_p95_ms is not None else []
        figures += [f"ITL p95 {at.itl_p95_ms:g} ms"] if at.itl_p95_ms is not None else []
        lines.append(f"Trial {trial.number}, {at.load}: {', '.join(figures)}.")
    lines.append(f"All figures: {report.folder}")
    return lines


def write_tuned(recipe: Recipe, report: TuneReport, file: Path, *, force: bool) -> TuneReport:
    """Write the tuned recipe.

    Args:
        recipe: The recipe as it is.
        report: Report with a recommendation to change something.
        file: File of the tuned recipe.
        force: Whether it may be overwritten.

    Returns:
        The report, which names the file.

    Raises:
        UserError: The file exists, or cannot be written.
    """
    text = tuned_recipe(recipe, report, file.absolute().parent)
    write_recipe(text, file, force=force)
    return report.model_copy(update={"tuned_recipe": str(file)})
