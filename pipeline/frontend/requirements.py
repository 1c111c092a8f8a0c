"""Packages for Python that a gateway needs, checked before any of them is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pipeline.cache.encryption import KEY
from pipeline.errors import InvalidInput
from pipeline.gateway.settings import TRACES_VARIABLES, GatewaySettings, GatewayStart
from pipeline.machine.packages import Need, require
from pipeline.recipe import Recipe
from pipeline.serving.deployments import find_deployment
from pipeline.stages.response_cache import needs_of_cache
from pipeline.store import Store
from pipeline.triton.deployment import package_recipe
from pipeline.triton.running import SUPERVISED


def require_packages(recipes: Sequence[Recipe], store: Store, settings: GatewaySettings) -> None:
    """Check that all packages are there which a gateway of these recipes needs.

    Raises:
        UserError: Some are missing; it names all of them.
    """
    needs = [Need("gateway", "the gateway")]
    if settings.traces or any(map(os.environ.get, TRACES_VARIABLES)):
        needs.append(Need("traces", "traces"))
    if settings.limits_redis:
        needs.append(Need("cache", "gateway.limits_redis", frozenset({"redis"})))
        if os.environ.get(KEY) or any(recipe.cache.encryption for recipe in recipes):
            needs.append(Need("cache", "encryption", frozenset({"cryptography"})))
    needs += [need for recipe in recipes for need in needs_of_cache(recipe, store)]
    require("the gateway", needs)


def known_recipes(start: GatewayStart, store: Store) -> list[Recipe]:
    """Find the recipes of a gateway, except those of deployments that it waits for."""
    if not start.recipes and start.sources.package is not None:
        return [package_recipe(start.sources.package, start.overrides)]
    recipes = []
    for name in start.recipes:
        try:
            recipes.append(find_deployment(name, start.overrides, store, states=SUPERVISED).recipe)
        except InvalidInput:
            if not start.sources.wait_s:
                raise
    return recipes
