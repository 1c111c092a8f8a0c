"""The stages of a build, and what runs them.

prepared = prepare(recipe, store)                     # resolve sources, make the plan
Builder(prepared.plan, store, prepared.work(progress), progress).run()
"""

from pipeline.stages.builder import Builder, Outcome, demanded
from pipeline.stages.handover import HandedOver, adopt_commands, check_adoptable, check_executor, write_script
from pipeline.stages.survey import Prepared, prepare

__all__ = [
    "Builder",
    "HandedOver",
    "Outcome",
    "Prepared",
    "adopt_commands",
    "check_adoptable",
    "check_executor",
    "demanded",
    "prepare",
    "write_script",
]
