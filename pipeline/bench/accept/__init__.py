"""`pipeline accept`: does a recipe do on this machine what was promised? One report says so, to be sent to anybody.

    report = accept(recipe, store, AcceptanceOptions(), Path("accept-llama-3.1-8b-fp8.json"), progress=progress)
    report.accepted

It builds, serves as a user does, streams, and holds what it sees against the plan, the gate and the SLO. `accept` has
the steps in their order, `judging` decides, `asking` asks, and `report` is what is written.
"""

from pipeline.bench.accept.accept import accept
from pipeline.bench.accept.report import AcceptanceCheck, AcceptanceReport, AcceptanceStep
from pipeline.bench.accept.run import AcceptanceOptions

__all__ = ["AcceptanceCheck", "AcceptanceOptions", "AcceptanceReport", "AcceptanceStep", "accept"]
