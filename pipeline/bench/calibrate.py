"""From results of `pipeline bench` to constants of the performance model: `pipeline plan RECIPE --calibrate-from`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline.bench.forecast import measured_loads
from pipeline.bench.result import BenchResult
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.extras import missing
from pipeline.plan.performance.calibration import MeasuredLoad, model_name, recipe_model
from pipeline.plan.performance.fit import CalibrationFit, fit_calibration
from pipeline.prepare.report import calibrated_device, make_report
from pipeline.recipe import CpuRuntime, Recipe
from pipeline.store import Store

__all__ = ["BenchCalibration", "calibrate_recipe"]


@dataclass(frozen=True, slots=True)
class BenchCalibration:
    """A fit, and what it was not made from.

    Attributes:
        fit: The constants, and how they do.
        unfit: A sentence for each load that is of no use.
        limited: How many loads of which files had a load generator that may have been the limit.
    """

    fit: CalibrationFit
    unfit: tuple[str, ...]
    limited: tuple[str, ...]


def calibrate_recipe(recipe: Recipe, store: Store, files: Sequence[Path]) -> BenchCalibration:
    """Fit the constants of a recipe's device to what was measured of it.

    Args:
        recipe: That was served: model, formats, split and limits are its.
        store: Where models lie.
        files: JSON of `pipeline bench`, one or more.

    Raises:
        UnreadableFile: A file cannot be read.
        InvalidInput: Files are no results, or of another runtime, GPU or processor, or have no load that is of use;
            with everything that is wrong.
        UserError: What the recipe puts on its device, or how fast that is at its best, is not known; or scipy is not
            installed.
    """
    results = _results(recipe, files)
    report = make_report(recipe, store, offline=True)
    if report.memory is None:
        raise UserError(f"what {recipe.name} puts on its device is not known: {report.unknown['memory']}")
    model = recipe_model(recipe, report.memory.spec, None)
    most = min(report.memory.sequences, model.spec.concurrency)
    loads, unfit = list[MeasuredLoad](), list[str]()
    for path, result in results.items():
        found, useless = measured_loads(result, path.name, model.draft_tokens, most)
        loads += found
        unfit += useless
    if not loads:
        raise InvalidInput("--calibrate-from", [Fault("no load is of use", where=text) for text in unfit])
    try:
        fit = fit_calibration(
            model,
            loads,
            about={
                "device": calibrated_device(recipe),
                "runtime": recipe.runtime.kind,
                "recipe": recipe.name,
                "made": datetime.now(UTC).isoformat(timespec="seconds"),
                "measured": [f"{path.name} ({result.made})" for path, result in results.items()],
            },
            source=model_name(recipe),
        )
    except ImportError as error:
        raise missing("fitting constants", error, "bench") from error
    limited = tuple(
        f"{count} of {len(result.levels)} loads of {path.name}"
        for path, result in results.items()
        if (count := sum(bool(level.generator.limits) for level in result.levels))
    )
    return BenchCalibration(fit, tuple(unfit), limited)


def _results(recipe: Recipe, files: Sequence[Path]) -> Mapping[Path, BenchResult]:
    """All files, if they are of the recipe's runtime and device."""
    results, faults = dict[Path, BenchResult](), list[Fault]()
    for path in files:
        try:
            results[path] = BenchResult.read(path)
        except InvalidInput as error:
            faults += [Fault(fault.problem, where=str(path), key=fault.key) for fault in error.faults]
            continue
        faults += [
            Fault(f"was measured on {has}, and the recipe is for {wanted}", where=str(path), key=key)
            for key, has, wanted in _differences(recipe, results[path])
        ]
    if faults:
        raise InvalidInput("--calibrate-from", faults)
    return results


def _differences(recipe: Recipe, result: BenchResult) -> list[tuple[str, object, object]]:
    """What a result says of its device that the recipe denies; what a result does not say counts as the recipe's."""
    on_cpu = isinstance(recipe.runtime, CpuRuntime)
    said = [
        ("target.runtime", result.target.get("runtime"), recipe.runtime.kind),
        ("machine.processor", result.machine.get("processor"), calibrated_device(recipe))
        if on_cpu
        else ("target.gpu", result.target.get("gpu"), calibrated_device(recipe)),
    ]
    return [one for one in said if one[1] is not None and one[1] != one[2]]
