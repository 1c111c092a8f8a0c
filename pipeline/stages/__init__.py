"""The stages of a build, and what runs them.

prepared = prepare(recipe, store)                     # resolve sources, make the plan
Builder(prepared.plan, store, prepared.work(progress), progress).run()
"""

from pipeline.stages.builder import Builder, Outcome, demanded
from pipeline.stages.survey import Prepared, prepare

__all__ = ["Builder", "Outcome", "Prepared", "demanded", "prepare"]
