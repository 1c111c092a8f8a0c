"""Run all rules on a recipe, its models, what will be written for it, and a machine; sort what they find, and refuse.

Pure. The facts are those of `pipeline.contracts`; nothing is downloaded, and what is not known is not judged. Each
group of rules is a file of contracts/data/rules; RECIPE_GROUPS and MACHINE_GROUPS name the module with its checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pipeline.contracts.rules import Rule, rule, rules
from pipeline.errors import InvalidInput
from pipeline.plan.machine_facts import MachineFacts
from pipeline.plan.model_facts import ModelFacts, offline_facts
from pipeline.plan.preflight import budgets, releases, serving, sourcing, speculation, splitting
from pipeline.plan.preflight import machine as machines
from pipeline.plan.preflight.context import Context, GeneratedConfig, make_context
from pipeline.plan.preflight.finding import Check, Finding, Objection
from pipeline.plan.preflight.needs import MachineCheck, MachineNeeds, needs_of
from pipeline.recipe import Recipe
from pipeline.recipe.loading import located, shown
from pipeline.recipe.validators import Problem, RecipeValues

# Group -> checks of a recipe, its models, and what will be written for it.
RECIPE_GROUPS: Mapping[str, Mapping[str, Check]] = {
    "releases": releases.RELEASE_CHECKS,
    "formats": releases.FORMAT_CHECKS,
    "splitting": splitting.CHECKS,
    "speculation": speculation.SPECULATION_CHECKS,
    "tokenizers": speculation.TOKENIZER_CHECKS,
    "budgets": budgets.CHECKS,
    "memory": budgets.MEMORY_CHECKS,
    "serving": serving.CHECKS,
    "sourcing": sourcing.CHECKS,
    "caching": serving.CACHE_CHECKS,
}
# Group -> checks of a machine, by what is needed of it.
MACHINE_GROUPS: Mapping[str, Mapping[str, MachineCheck]] = {
    "devices": machines.DEVICE_CHECKS,
    "software": machines.SOFTWARE_CHECKS,
    "host": machines.HOST_CHECKS,
}
RECIPE_CHECKS = {name: check for group in RECIPE_GROUPS.values() for name, check in group.items()}
MACHINE_CHECKS = {name: check for group in MACHINE_GROUPS.values() for name, check in group.items()}
CHECKED = frozenset(RECIPE_CHECKS) | frozenset(MACHINE_CHECKS)


_ECHO = "runtime.refuses"
_CLASS = ("model.class", "model.served")
_ORDER = {"error": 0, "warning": 1, "note": 2}


def findings(
    recipe: Recipe,
    models: Mapping[str, ModelFacts] | None = None,
    machine: MachineFacts | None = None,
    emitted: GeneratedConfig | None = None,
) -> tuple[Finding, ...]:
    """Run all rules on a recipe, and return what they find, the gravest first.

    Args:
        models: Role -> facts; by default those that are known offline.
        machine: Where it is to be built or served; None judges no machine.
        emitted: The runtime's settings; None leaves their rules out.
    """
    context = make_context(recipe, offline_facts(recipe) if models is None else models, machine, emitted)
    found = [
        *_of_recipe(context),
        *(_of_machine(needs_of(context), machine) if machine is not None else ()),
    ]
    return _sorted(_without_echoes(found))


def machine_findings(needs: MachineNeeds, machine: MachineFacts) -> tuple[Finding, ...]:
    """Run the rules of machines on needs alone, as of a package; return what they find, the gravest first."""
    return _sorted(_of_machine(needs, machine))


def refuse(recipe: Recipe, found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Raise if a finding (after `allow`) refuses the recipe; else return the findings.

    Raises:
        InvalidInput: With every error that is not allowed as a fault, at its line of the recipe.
    """
    stopping = [finding for finding in found if finding.stops]
    if stopping:
        problems = [Problem(one.keys, one.problem, one.fix, one.rule) for one in stopping]
        file = recipe.provenance.file
        raise InvalidInput(shown(file) if file else f"recipe {recipe.name}", located(recipe, problems))
    return found


def _of_recipe(context: Context) -> list[Finding]:
    """Findings of a recipe. A model whose class nothing here can run is refused for that alone, whatever its sizes."""
    found = list(_checked(context))
    classes = [one for one in found if one.rule in _CLASS]
    if not classes:
        return found
    rest = _checked(context.without_sizes({one.keys[0] for one in classes}))
    return [*classes, *(one for one in rest if one.rule not in _CLASS)]


def _checked(context: Context) -> Iterator[Finding]:
    values, runtime = RecipeValues(context.recipe.model_dump(mode="json")), context.gpu_runtime
    version = runtime.version if runtime is not None and not context.release_problem else None
    for one in rules():
        if one.id in RECIPE_CHECKS and one.concerns(context.kind, version):
            for said in RECIPE_CHECKS[one.id](context):
                yield _finding(one, context.kind, said, values[said.keys[0]])


def _of_machine(needs: MachineNeeds, machine: MachineFacts) -> Iterator[Finding]:
    version = needs.serving.version if needs.serving is not None else None
    for name, check in MACHINE_CHECKS.items():
        if rule(name).concerns(needs.kind, version):
            for said in check(needs, machine):
                yield _finding(rule(name), needs.kind, said, needs.values.get(said.keys[0]))


def _finding(one: Rule, kind: str, said: Objection, value: object) -> Finding:
    return Finding(
        rule=one.id,
        severity=said.severity or one.severity(kind),
        keys=said.keys,
        value=value,
        problem=said.problem,
        reason=one.reason,
        fix=said.fix,
        sources=said.sources or one.sources,
    )


def _without_echoes(found: list[Finding]) -> list[Finding]:
    """Without the runtime's own refusals of what another rule explains, and stops for sure."""
    explained = {
        key
        for one in found
        if one.severity == "error" and one.rule != _ECHO and rule(one.rule).never_allowed
        for key in one.keys
    }
    return [one for one in found if one.rule != _ECHO or not explained & {*one.keys, "runtime.kind"}]


def _sorted(found: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: _ORDER[finding.severity]))
