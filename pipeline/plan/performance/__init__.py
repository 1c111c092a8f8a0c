"""How fast a deployment will be, before it is built: a roofline with constants fitted to published figures.

    forecast_recipe(recipe, spec)    first token, time between tokens, tokens a second, where the SLO breaks

From the bottom up: `roofline` (one step, and the constants), `engine` (prompts, answers, drafts), `service` (many
requests, cost), `forecast`, `compare` (other deployments). `accuracy` holds the model against what others measured;
`calibration` has the constants of one device, which `fit` finds from loads that were measured there. Pure; facts are in
`data/` and in `contracts/data/gpus.yaml`.
"""

from pipeline.plan.performance.accuracy import Estimate
from pipeline.plan.performance.engine import EngineSpeed, Workload
from pipeline.plan.performance.forecast import Forecast, Gain, forecast, forecast_recipe
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
