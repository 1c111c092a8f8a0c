"""A recipe sized by its plan: as many requests at a time as meet the SLO, and replicas for a rate of requests.

    text = sized_recipe(report, folder)      `pipeline plan RECIPE --rate 20 --output sized.yaml`

`pipeline deploy sized.yaml --target kubernetes` makes manifests of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import UserError
from pipeline.plan.performance import Forecast
from pipeline.prepare.report import PlanReport
from pipeline.recipe.catalog import annotated_yaml, written_values


def sized_recipe(report: PlanReport, folder: Path) -> str:
    """Write a recipe with what its plan found, and the figures as comments.

    Args:
        folder: Folder of the file; in that of the recipe, paths stay relative.

    Raises:
        UserError: The plan has no forecast, or nothing meets the SLO.
    """
    recipe, forecast = report.recipe, report.performance
    if forecast is None:
        raise UserError(
            f"there is no forecast to size by: {report.unknown.get('performance', 'nothing fits')}"
        )
    reasons = dict(_sizes(forecast))
    if not reasons:
        raise UserError("nothing meets the SLO, so there is no size to write")
    provenance = recipe.provenance
    values = written_values(provenance, provenance.overrides, recipe.model_dump(mode="json"), folder)
    for (section, key), (value, _) in reasons.items():
        values[section] = (values.get(section) or {}) | {key: value}
    comments = {".".join(key): reason for key, (_, reason) in reasons.items()}
    return annotated_yaml(_head(report, forecast), values, comments)


def _sizes(forecast: Forecast) -> Iterator[tuple[tuple[str, str], tuple[int, str]]]:
    """Yield section and key, with the value and the reason of each."""
    best, rate = forecast.lifted or forecast.within_slo, forecast.rate
    if rate is not None and rate.replicas is not None:
        load = rate.load
        assert load is not None, "there are replicas"
        often = f"{rate.requests_per_s:g} requests/s at the peak, {rate.each:.3g} of them each at most"
        first = f"first token p95 {load.settled_ttft.p95:.0f} ms, between tokens p95 {load.itl.p95:.1f} ms"
        yield ("kubernetes", "min_replicas"), (rate.replicas, f"{often}; {first} by the plan")
        yield ("kubernetes", "max_replicas"), (2 * rate.replicas, "twice as many, for what exceeds the peak")
    if best is not None and rate is None:
        figures = (
            f"first token p95 {best.ttft_ms:.0f} ms, between tokens p95 {best.itl_p95_ms:.1f} ms by the plan"
        )
        yield ("limits", "max_concurrency"), (best.batch, f"the most that meet the SLO: {figures}")


def _head(report: PlanReport, forecast: Forecast) -> list[str]:
    argv = ("pipeline", "plan", *report.recipe.argv)
    lengths = f"prompts of {forecast.work.prompt_tokens} and answers of {forecast.work.output_tokens} tokens"
    lines = [f"{report.recipe.name}, sized by {shlex.join(argv)} for {lengths}."]
    return [*lines, *(f"{warning[:1].upper()}{warning[1:]}." for warning in forecast.warnings)]
