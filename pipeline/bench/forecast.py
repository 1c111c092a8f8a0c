"""Forecasts of `pipeline plan` beside a measurement, and constants of the plan fitted to measurements.

forecaster = LoadForecaster.of(recipe, store); forecaster.forecast(levels)      `BenchResult.forecast`
calibrate_recipe(recipe, store, [Path("bench.json")])                           `pipeline plan calibrate`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pipeline.bench.result import BenchForecast, BenchResult, ForecastPoint, LevelResult
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.extras import missing
from pipeline.plan.performance.calibration import MeasuredLoad, model_name, recipe_model
from pipeline.plan.performance.engine import token_acceptance
from pipeline.plan.performance.fit import CalibrationFit, fit_calibration
from pipeline.plan.performance.queueing import Workload
from pipeline.plan.performance.service import DeploymentModel
from pipeline.prepare.calibrations import calibrated_device, stored_calibration
from pipeline.prepare.report import make_report
from pipeline.recipe import CpuRuntime, Recipe
from pipeline.store import Store

_MAX_CACHED = 0.01  # share of answers from a response cache, which no model of an engine has
_MAX_FAILED = 0.01


@dataclass(frozen=True, slots=True)
class LoadForecaster:
    """Computes loads of a deployment, with everything that it needs settled before they are measured.

    Attributes:
        none_because: Why nothing can be computed; empty where something can.
        most: Requests that run at a time.
        acceptance: Acceptance of the draft by the calibration, for runs that do not report it.
        source: Where the constants come from.
    """

    none_because: str = ""
    model: DeploymentModel | None = None
    most: int = 0
    acceptance: float | None = None
    device: str = ""
    source: str = ""

    @classmethod
    def of(cls, recipe: Recipe | None, store: Store | None) -> Self:
        """Plan a recipe as `pipeline plan` does offline, with the calibration that the store has."""
        if recipe is None or store is None:
            return cls("the recipe of the server is not known")
        try:
            calibration = stored_calibration(recipe, store)
            if calibration is None and isinstance(recipe.runtime, CpuRuntime):
                return cls(
                    "how fast a processor is shows only by measuring: pipeline plan "
                    f"calibrate {recipe.name} takes the JSON of a run"
                )
            report = make_report(recipe, store, offline=True)
            if report.memory is None:
                return cls(report.unknown["memory"])
            model = recipe_model(recipe, report.memory.spec, calibration)
        except UserError as error:
            return cls(str(error))
        gpus, device = model.spec.ranks, calibration.device if calibration else model.spec.device
        return cls(
            model=model,
            most=min(report.memory.sequences, model.spec.concurrency),
            acceptance=calibration.reach.acceptance if calibration and recipe.draft else None,
            device=f"{gpus} x {device}" if gpus > 1 else device,
            source="published figures" if calibration is None else calibration.source,
        )

    def forecast(self, levels: Sequence[LevelResult]) -> BenchForecast:
        """Forecast each load that was measured, with its own mean lengths and its draft's acceptance."""
        if self.model is None:
            return BenchForecast(none_because=self.none_because)
        return BenchForecast(
            device=self.device,
            source=self.source,
            points=tuple(self._point(level, self.model) for level in levels),
        )

    def _point(self, level: LevelResult, model: DeploymentModel) -> ForecastPoint | None:
        load = _measured_load(level, "", model.options.draft_tokens)
        if isinstance(load, str) or load.concurrency > self.most:
            return None
        acceptance = self.acceptance if load.acceptance is None else load.acceptance
        computed = model.service(acceptance).at(load.concurrency, load.work)
        return ForecastPoint(
            concurrency=load.concurrency,
            ttft_p95_ms=round(computed.ttft_ms, 3),
            tpot_mean_ms=round(computed.itl_ms, 3),
            itl_p95_ms=round(computed.itl_p95_ms, 3),
            output_tokens_per_s=round(computed.tokens_per_s, 3),
        )


@dataclass(frozen=True, slots=True)
class BenchCalibration:
    """Constants fitted to results of `pipeline bench`.

    Attributes:
        unfit: A sentence for each load that could not be used.
    """

    fit: CalibrationFit
    unfit: tuple[str, ...]

    @property
    def helps(self) -> bool:
        """Whether held-out loads are forecast no worse than before in most figures; true without any."""
        improved = [
            errors.left_out <= errors.before
            for errors in self.fit.calibration.errors.values()
            if errors.left_out is not None and errors.before is not None
        ]
        return not improved or 2 * sum(improved) > len(improved)


def calibrate_recipe(recipe: Recipe, store: Store, files: Sequence[Path]) -> BenchCalibration:
    """Fit the constants of a recipe's device to measurements of it.

    Raises:
        UnreadableFile: A file cannot be read.
        InvalidInput: Files are no results, or of another runtime, GPU or processor, or have no usable load; lists
            everything that is wrong.
        UserError: The memory or the peak rates of the recipe's device are not known; or scipy is not installed.
    """
    results = _results(recipe, files)
    report = make_report(recipe, store, offline=True)
    if report.memory is None:
        raise UserError(f"what {recipe.name} puts on its device is not known: {report.unknown['memory']}")
    model = recipe_model(recipe, report.memory.spec, None)
    # With more requests than run at a time some wait for room, which no constant explains.
    most = min(report.memory.sequences, model.spec.concurrency)
    loads, unfit = list[MeasuredLoad](), list[str]()
    for path, result in results.items():
        for level in result.levels:
            load = _measured_load(level, path.name, model.options.draft_tokens)
            if reason := _why_unfit(load, model.options.draft_tokens, most):
                unfit.append(f"{path.name}, {level.load}: {reason}")
            elif isinstance(load, MeasuredLoad):
                loads.append(load)
    if not loads:
        raise InvalidInput("BENCH.json", [Fault("this load cannot be used", where=text) for text in unfit])
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
    return BenchCalibration(fit, tuple(unfit))


def _results(recipe: Recipe, files: Sequence[Path]) -> Mapping[Path, BenchResult]:
    """Read all files; refuse those of another runtime or device than the recipe's."""
    results, faults = dict[Path, BenchResult](), list[Fault]()
    for path in files:
        try:
            results[path] = BenchResult.read(path)
        except InvalidInput as error:
            faults += [replace(fault, where=str(path)) for fault in error.faults]
            continue
        faults += [
            Fault(f"was measured on {has}, and the recipe is for {wanted}", where=str(path), key=key)
            for key, has, wanted in _differences(recipe, results[path])
        ]
    if faults:
        raise InvalidInput("BENCH.json", faults)
    return results


def _differences(recipe: Recipe, result: BenchResult) -> Iterator[tuple[str, object, object]]:
    """Yield what a result says otherwise of its device than the recipe; what it does not say counts as the recipe's."""
    runtime, device = result.target.get("runtime"), calibrated_device(recipe)
    if runtime not in (None, recipe.runtime.kind):
        yield "target.runtime", runtime, recipe.runtime.kind
    part, name = ("machine", "processor") if isinstance(recipe.runtime, CpuRuntime) else ("target", "gpu")
    measured_on = getattr(result, part).get(name)
    if measured_on not in (None, device):
        yield f"{part}.{name}", measured_on, device


def _measured_load(level: LevelResult, source: str, draft_tokens: int) -> MeasuredLoad | str:
    """Figures of a load that constants can be fitted to, or why there are none.

    Args:
        draft_tokens: Tokens that a draft proposes in a round; 0 without one.
    """
    latencies = level.latencies
    if "ttft" not in latencies or "tpot" not in latencies or "total" not in latencies:
        return "no answer of two or more tokens was completed"
    if level.input_tokens_mean is None or level.output_tokens_mean is None:
        return "the server did not say how many tokens there were"
    if (level.cached_share or 0.0) > _MAX_CACHED:
        return "answers came from the response cache"
    if level.failed_share > _MAX_FAILED:
        return f"{level.failed_share:.0%} of the requests failed"
    if level.requests["left"]:
        return "clients left within answers"
    if level.generator.limits:
        return f"the load generator itself may have been the limit: {level.generator.limits}"
    if level.stalled:
        return f"the server was silent for {level.longest_silence_s:.1f} s"
    if level.interrupted:
        return "it was ended early"
    # Little's law; in a closed loop it is the load itself.
    under_way = level.requests_per_s * latencies["total"].mean / 1e3
    accepted = level.acceptance if draft_tokens else None
    return MeasuredLoad(
        source=source,
        concurrency=level.load.concurrency if level.kind == "concurrency" else max(1, round(under_way)),
        work=Workload(round(level.input_tokens_mean), round(level.output_tokens_mean)),
        ttft_p50_ms=latencies["ttft"].p50,
        ttft_p95_ms=latencies["ttft"].p95,
        itl_ms=latencies["tpot"].mean,
        tokens_per_s=level.output_tokens_per_s,
        acceptance=None if accepted is None else token_acceptance(accepted, draft_tokens),
    )


def _why_unfit(load: MeasuredLoad | str, draft_tokens: int, most: int) -> str:
    if isinstance(load, str):
        return load
    if load.concurrency > most:
        return f"more than the {most} that run at a time"
    if draft_tokens and load.acceptance is None:
        return "how many of the draft's tokens were accepted is not in it"
    return ""
