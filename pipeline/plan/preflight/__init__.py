"""Preflight: every rule that is known, held against a recipe, its models, what will be written, and a machine.

    found = findings(recipe, models, machine, emitted)   # all at once, the gravest first
    found = allow(found, check_allowed(["sm.fp8"]))      # errors that a user lets pass: --allow
    refuse(recipe, found)                                # raises what stops a build, returns the others

The rules themselves (severity, reason, sources, what may be allowed) are data: `pipeline.contracts.rules`, one file of
`contracts/data/rules` a group. The checks of a group are in the module of the same name, of two in a neighbour's:

    releases      release, GPU, flags and models that a release must know
    formats       weights and KV cache, by GPU
    splitting     what must divide
    speculation   a draft and its target
    tokenizers    whether both speak of the same tokens
    budgets       lengths, and the tokens of a step
    memory        whether it fits on its GPUs                  in budgets.py
    serving       what Triton's models will say
    sourcing      what the hub answers
    caching       what the response cache answers              in serving.py
    devices       GPUs of a machine
    software      what is installed there
    host          its memory, disks, limits and ports
"""

from pipeline.plan.preflight.context import GeneratedConfig
from pipeline.plan.preflight.finding import (
    ALLOWABLE,
    Finding,
    allow,
    check_allowed,
    finding_lines,
    manifest_findings,
)
from pipeline.plan.preflight.needs import MachineNeeds, ServingNeeds
from pipeline.plan.preflight.run_rules import findings, machine_findings, refuse

__all__ = [
    "ALLOWABLE",
    "Finding",
    "GeneratedConfig",
    "MachineNeeds",
    "ServingNeeds",
    "allow",
    "check_allowed",
    "finding_lines",
    "findings",
    "machine_findings",
    "manifest_findings",
    "refuse",
]  # fmt: skip
