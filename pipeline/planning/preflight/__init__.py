"""Preflight: every rule that is known, held against a recipe, its models, what will be written, and a machine.

    found = findings(recipe, models, machine)   # all at once, the gravest first
    refuse(recipe, found)                       # raises what stops a build, returns what is only to be said

The rules themselves (severity, reason, sources) are data: `pipeline.contracts.rules`. One file a group of checks:

    releases      release, GPU, flags and models that a release must know
    formats       weights and KV cache, by GPU
    splitting     what must divide
    speculation   a draft and its target
    budgets       lengths, and the tokens of a step
"""

from pipeline.planning.preflight.emission import Emission
from pipeline.planning.preflight.finding import Finding
from pipeline.planning.preflight.judging import CHECKS, findings, refuse

__all__ = ["CHECKS", "Emission", "Finding", "findings", "refuse"]
