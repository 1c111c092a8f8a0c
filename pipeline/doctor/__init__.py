"""`pipeline doctor`: what this machine can do, and which recipes are runnable on it.

    report = examine(["llama-3.1-8b-fp8"], store)
    report.runnable

`pipeline.machine` looks, `pipeline.plan.preflight` judges; here the two are put together and made readable.
"""

from pipeline.doctor.examine import examine
from pipeline.doctor.report import Check, Obstacle, Report, Section, Verdict, Way

__all__ = ["Check", "Obstacle", "Report", "Section", "Verdict", "Way", "examine"]
