"""The check of each rule, by its id: one module a group, as there is one file of data."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.plan.preflight import (
    budgets,
    caching,
    devices,
    formats,
    host,
    memory,
    releases,
    serving,
    software,
    sourcing,
    speculation,
    splitting,
    tokenizers,
)
from pipeline.plan.preflight.finding import Check
from pipeline.plan.preflight.needs import MachineCheck

# Group -> checks of a recipe, its models, and what will be written for it.
RECIPE_GROUPS: Mapping[str, Mapping[str, Check]] = {
    "releases": releases.CHECKS,
    "formats": formats.CHECKS,
    "splitting": splitting.CHECKS,
    "speculation": speculation.CHECKS,
    "tokenizers": tokenizers.CHECKS,
    "budgets": budgets.CHECKS,
    "memory": memory.CHECKS,
    "serving": serving.CHECKS,
    "sourcing": sourcing.CHECKS,
    "caching": caching.CHECKS,
}
# Group -> checks of a machine, by what is needed of it.
MACHINE_GROUPS: Mapping[str, Mapping[str, MachineCheck]] = {
    "devices": devices.CHECKS,
    "software": software.CHECKS,
    "host": host.CHECKS,
}
RECIPE_CHECKS = {name: check for group in RECIPE_GROUPS.values() for name, check in group.items()}
MACHINE_CHECKS = {name: check for group in MACHINE_GROUPS.values() for name, check in group.items()}
CHECKED = frozenset(RECIPE_CHECKS) | frozenset(MACHINE_CHECKS)
