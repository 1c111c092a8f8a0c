"""All that can be said against a recipe without a download, a store or a machine: what `recipes validate` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.planning.plan import DRAFT, TARGET
from pipeline.planning.preflight import Emission, Finding, findings, refuse
from pipeline.recipe import Recipe
from pipeline.runtimes.base import runtime_of
from pipeline.store import Json

Settings = Mapping[str, Json]


def judge(recipe: Recipe) -> tuple[Finding, ...]:
    """What is to be known of a recipe that is not refused.

    Raises:
        InvalidInput: what it asks for does not exist, or its runtime cannot be told so; with all that is known.
    """
    return refuse(recipe, findings(recipe, emitted=emission(recipe)))


def emission(recipe: Recipe) -> Emission:
    """What the runtime will write, and what it refuses when it works that out."""
    runtime, refusals = runtime_of(recipe), list[Fault]()
    roles = (TARGET,) if recipe.draft is None else (TARGET, DRAFT)
    build = {role: _worked_out(partial(runtime.build_settings, recipe, role), refusals) for role in roles}
    package = _worked_out(partial(runtime.package_settings, recipe), refusals)
    return Emission({role: found for role, found in build.items() if found}, package, _once(refusals))


def _worked_out(settings: Callable[[], Settings], refusals: list[Fault]) -> Settings:
    """The settings; nothing, and the reasons among the refusals, if there cannot be any."""
    try:
        return settings()
    except InvalidInput as error:
        refusals += error.faults
    except UserError as error:
        refusals.append(Fault(str(error)))
    return {}


def _once(faults: list[Fault]) -> tuple[Fault, ...]:
    """What target, draft and package are refused for alike."""
    return tuple({str(fault): fault for fault in faults}.values())
