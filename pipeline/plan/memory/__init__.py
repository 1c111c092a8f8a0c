"""Memory of a deployment, rank by rank, before anything is downloaded.

    spec = deployment_spec(recipe, sizes)   # what is to lie together: models, formats, split, limits
    memory = plan_memory(spec)              # every figure as a line with its formula; tokens, sequences, head-room
    alternatives(recipe, spec)              # what would fit, each with figures of its own

Pure. `tensors` says which matrices a model has, and what they and its KV cache take; `capacity` says what fits.
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
