"""Memory of a deployment, rank by rank, before anything is downloaded.

    demand = demand_of(recipe, sizes)     # what is to lie together: models, formats, split, limits
    memory = plan_memory(demand)          # every figure as a line with its formula; tokens, sequences, head-room
    alternatives(recipe, demand)          # what would fit, each with figures of its own

Pure. One file a noun: tensors (which matrices there are), weights, kv, rank (load order), capacity (what fits).
"""

from pipeline.plan.memory.alternatives import Alternative, alternatives
from pipeline.plan.memory.capacity import MemoryPlan, RankMemory, plan_memory
from pipeline.plan.memory.recipe_spec import deployment_spec
from pipeline.plan.memory.spec import DeploymentSpec, MemoryLine, ModelSpec, StepLimits

__all__ = [
    "Alternative",
    "DeploymentSpec",
    "MemoryLine",
    "MemoryPlan",
    "ModelSpec",
    "RankMemory",
    "StepLimits",
    "alternatives",
    "deployment_spec",
    "plan_memory",
]
