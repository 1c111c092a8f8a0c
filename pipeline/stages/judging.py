"""All that can be said against a recipe without a download, a store or a machine: what `recipes validate` prints."""

from __future__ import annotations

from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.planning.plan import DRAFT, TARGET
from pipeline.planning.preflight import Finding, findings, refuse
from pipeline.recipe import Recipe
from pipeline.recipe.locating import shown
from pipeline.runtimes.base import runtime_of


def judge(recipe: Recipe) -> tuple[Finding, ...]:
    """What is to be known of a recipe that is not refused.

    Raises:
        InvalidInput: what it asks for does not exist, or its runtime cannot be told so; with all that is known.
    """
    found = refuse(recipe, findings(recipe))
    faults = _refusals(recipe)
    if faults:
        file = recipe.provenance.file
        raise InvalidInput(shown(file) if file else f"recipe {recipe.name}", faults)
    return found


def _refusals(recipe: Recipe) -> list[Fault]:
    """What the runtime refuses when it works out the settings of its engines and of its Triton models."""
    runtime = runtime_of(recipe)
    roles = (TARGET,) if recipe.draft is None else (TARGET, DRAFT)
    faults: list[Fault] = []
    try:
        for role in roles:
            runtime.build_settings(recipe, role)
        runtime.package_settings(recipe)
    except InvalidInput as error:
        faults += error.faults
    except UserError as error:
        faults.append(Fault(str(error)))
    return faults
