"""What `pipeline plan` says of a deployment under the loads that were measured, and what a run tells of its constants.

forecast = bench_forecast(recipe, spec, levels, calibration)      beside the measurement, in `BenchResult.forecast`
loads, unfit = measured_loads(result, "bench.json", …)            for `pipeline plan --calibrate-from`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import UserError
from pipeline.plan.performance.calibration import MeasuredLoad, recipe_model
from pipeline.plan.performance.engine import token_acceptance
from pipeline.plan.performance.forecast import UNDER_LOAD
from pipeline.plan.performance.service import DeploymentModel
from pipeline.plan.performance.workload import Workload
from pipeline.prepare.report import make_report, stored_calibration
from pipeline.recipe import CpuRuntime, Recipe
from pipeline.store import Store

if TYPE_CHECKING:
    from pipeline.bench.result import BenchResult, LevelResult

__all__ = ["BenchForecast", "ForecastPoint", "Promise", "measured_loads"]

_MAX_CACHED = 0.01  # share of answers from a response cache, which no model of an engine has
_MAX_FAILED = 0.01


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ForecastPoint(_Section):
    """One load, as it was computed."""

    concurrency: int = Field(
        description="Requests at a time; of an open loop as many as there were on average."
    )
    ttft_p95_ms: float
    tpot_mean_ms: float
    itl_p95_ms: float
    output_tokens_per_s: float


class BenchForecast(_Section):
    """The loads of a run, as `pipeline plan` computes them; or why it cannot."""

    none_because: str = Field(default="", description="Why there is none; empty where there is one.")
    device: str = Field(default="", description="What it is computed for.")
    source: str = Field(default="", description="Where the constants come from.")
    points: tuple[ForecastPoint | None, ...] = Field(
        default=(), description="One for each load, in their order; null where it is beyond what is computed."
    )
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Promise:
    """What a deployment is computed with, settled before it is measured.

    Attributes:
        none_because: Why nothing can be computed; empty where something can.
        model: Of the deployment.
        most: Requests that run at a time.
        acceptance: Of the draft where a run does not say it, as the calibration has it.
        device: For people.
        source: Where the constants come from.
    """

    none_because: str = ""
    model: DeploymentModel | None = None
    most: int = 0
    acceptance: float | None = None
    device: str = ""
    source: str = ""

    @classmethod
    def made(cls, recipe: Recipe | None, store: Store | None) -> Self:
        """Plan a recipe, as `pipeline plan --offline` does, with the calibration that the store has.

        Args:
            recipe: That is served; None where it is not known.
            store: Where models and calibrations lie.
        """
        if recipe is None or store is None:
            return cls("the recipe of the server is not known")
        try:
            calibration = stored_calibration(recipe, store)
            if calibration is None and isinstance(recipe.runtime, CpuRuntime):
                return cls(
                    "how fast a processor is shows only by measuring: pipeline plan "
                    f"{recipe.name} --calibrate-from takes the JSON of a run"
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

    def of(self, levels: Sequence[LevelResult]) -> BenchForecast:
        """Forecast each load that was measured, with its own mean lengths and its draft's acceptance.

        Args:
            levels: What was measured.
        """
        if self.model is None:
            return BenchForecast(none_because=self.none_because)
        return BenchForecast(
            device=self.device,
            source=self.source,
            points=tuple(self._point(level, self.model) for level in levels),
            warnings=(UNDER_LOAD,),
        )

    def _point(self, level: LevelResult, model: DeploymentModel) -> ForecastPoint | None:
        load = _measured(level, "", model.draft_tokens)
        if isinstance(load, str) or load.concurrency > self.most:
            return None
        acceptance = self.acceptance if load.acceptance is None else load.acceptance
        found = model.service(acceptance).at(load.concurrency, load.work)
        return ForecastPoint(
            concurrency=load.concurrency,
            ttft_p95_ms=round(found.ttft_ms, 3),
            tpot_mean_ms=round(found.itl_ms, 3),
            itl_p95_ms=round(found.itl_p95_ms, 3),
            output_tokens_per_s=round(found.tokens_per_s, 3),
        )


def measured_loads(
    result: BenchResult, source: str, draft_tokens: int, most: int
) -> tuple[tuple[MeasuredLoad, ...], tuple[str, ...]]:
    """Take from a run what constants can be fitted to.

    Args:
        result: Of the run.
        source: Its file.
        draft_tokens: That a draft proposes in a round; 0 without one.
        most: Requests that run at a time: with more, some wait for room, which no constant explains.

    Returns:
        The loads, and a sentence for each that is of no use.
    """
    loads, unfit = [], []
    for level in result.levels:
        found = _measured(level, source, draft_tokens)
        if isinstance(found, str):
            unfit.append(f"{source}, {level.load}: {found}")
        elif found.concurrency > most:
            unfit.append(f"{source}, {level.load}: more than the {most} that run at a time")
        elif draft_tokens and found.acceptance is None:
            unfit.append(
                f"{source}, {level.load}: how many of the draft's tokens were accepted is not in it "
                "(pipeline bench --way triton has it)"
            )
        else:
            loads.append(found)
    return tuple(loads), tuple(unfit)


def _measured(level: LevelResult, source: str, draft_tokens: int) -> MeasuredLoad | str:
    """What constants can be fitted to, or why they cannot."""
    found = level.latencies
    if "ttft" not in found or "tpot" not in found or "total" not in found:
        return "no answer of two or more tokens was completed"
    if level.input_tokens_mean is None or level.output_tokens_mean is None:
        return "the server did not say how many tokens there were"
    if (level.cached_share or 0.0) > _MAX_CACHED:
        return "answers came from the response cache"
    if level.failed_share > _MAX_FAILED:
        return f"{level.failed_share:.0%} of the requests failed"
    if level.requests["left"]:
        return "clients left within answers"
    # Little's law; of a closed loop it is the load itself.
    under_way = level.requests_per_s * found["total"].mean / 1e3
    accepted = level.acceptance if draft_tokens else None
    return MeasuredLoad(
        source=source,
        concurrency=level.load.concurrency if level.kind == "concurrency" else max(1, round(under_way)),
        work=Workload(round(level.input_tokens_mean), round(level.output_tokens_mean)),
        ttft_p50_ms=found["ttft"].p50,
        ttft_p95_ms=found["ttft"].p95,
        itl_ms=found["tpot"].mean,
        tokens_per_s=level.output_tokens_per_s,
        acceptance=None if accepted is None else token_acceptance(accepted, draft_tokens),
    )
