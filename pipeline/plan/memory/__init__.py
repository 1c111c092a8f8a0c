"""Memory of a deployment, rank by rank, before anything is downloaded.

    demand = demand_of(recipe, sizes)     # what is to lie together: models, formats, split, limits
    memory = plan_memory(demand)          # every figure as a line with its formula; tokens, sequences, head-room
    alternatives(recipe, demand)          # what would fit, each with figures of its own

Pure. One file a noun: tensors (which matrices there are), weights, kv, rank (load order), capacity (what fits).
"""

from pipeline.plan.memory.alternatives import Alternative, alternatives
from pipeline.plan.memory.capacity import MemoryPlan, RankMemory, plan_memory
from pipeline.plan.memory.demand import Demand, ModelNeed
from pipeline.plan.memory.line import Line
from pipeline.plan.memory.of_recipe import StepLimits, demand_of

__all__ = [
    "Alternative",
    "Demand",
    "Line",
    "MemoryPlan",
    "ModelNeed",
    "RankMemory",
    "StepLimits",
    "alternatives",
    "demand_of",
    "plan_memory",
]
