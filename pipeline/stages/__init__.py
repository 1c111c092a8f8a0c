"""The stages of a build, and what runs them.

prepared = prepare(recipe, store)                     # resolve sources, make the plan
Builder(prepared.plan, store, prepared.work(progress), progress).run()
"""

from pipeline.stages.builder import Builder, Outcome, demanded
from pipeline.stages.prepare import Foreseen, Prepared, foresee, prepare
from pipeline.stages.remote_build import HandoverScript, adopt, build_or_hand_over

__all__ = [
    "Builder",
    "Foreseen",
    "HandoverScript",
    "Outcome",
    "Prepared",
    "adopt",
    "build_or_hand_over",
    "demanded",
    "foresee",
    "prepare",
]
