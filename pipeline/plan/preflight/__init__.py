"""Preflight: every rule that is known, held against a recipe, its models, what will be written, and a machine.

    found = findings(recipe, models, machine, emitted)   # all at once, the gravest first
    found = allow(found, check_allowed(["sm.fp8"]))      # errors that a user lets pass: --allow
    refuse(recipe, found)                                # raises what stops a build, returns the others

The rules themselves (severity, reason, sources, what may be allowed) are data: `pipeline.contracts.rules`, one file of
`contracts/data/rules` a group. Their checks:

    releases.py      releases: release, GPU, flags, models; formats: weights and KV cache, by GPU
    support.py       support: models and features that upstream lists
    splitting.py     what must divide
    speculation.py   speculation: a draft and its target; tokenizers: whether both speak of the same tokens
    budgets.py       budgets: lengths, and the tokens of a step; memory: whether it fits on its GPUs
    serving.py       serving: what Triton's models will say; caching: what the response cache answers
    sourcing.py      what the hub answers, and what a local folder holds
    machine.py       devices, software and host of a machine
"""

from pipeline.plan.preflight.context import GeneratedConfig
from pipeline.plan.preflight.needs import MachineNeeds, ServingNeeds
from pipeline.plan.preflight.run_rules import (
    ALLOWABLE,
    Finding,
    allow,
    check_allowed,
    finding_lines,
    findings,
    machine_findings,
    manifest_findings,
    refuse,
)

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
