"""How fast a deployment will be, before it is built: a simulated scheduler on a roofline, with fitted constants.

    forecast_recipe(recipe, spec)    first token, time between tokens, tokens a second, where the SLO breaks

From the bottom up: `model_load` (bytes and operations), `roofline` (one step, and the constants), `engine` (drafts, and
times of steps), `scheduler` (in-flight batching), `queueing` (requests before it), `service` (loads, cost), `forecast`,
`compare` (others).
`accuracy` computes what others measured, `estimates` says how far figures of a class are off; `calibration` has the
constants of one device, which `fit` finds from loads that were measured there. Pure; facts are in `data/` and in
`contracts/data/gpus.yaml`.
"""

from pipeline.plan.performance.engine import EngineSpeed
from pipeline.plan.performance.estimates import Estimate
from pipeline.plan.performance.forecast import Forecast, Gain
from pipeline.plan.performance.forecasting import forecast, forecast_recipe
from pipeline.plan.performance.queueing import Workload
from pipeline.plan.performance.service import LoadPoint

__all__ = [
    "EngineSpeed",
    "Estimate",
    "Forecast",
    "Gain",
    "LoadPoint",
    "Workload",
    "forecast",
    "forecast_recipe",
]
