"""From the recipes that a gateway is to serve to their packages and to the Triton servers that run them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.gateway.served import Served, template_of
from pipeline.gateway.tools.dialect import dialect_of
from pipeline.prepare import prepare
from pipeline.progress import Silent
from pipeline.recipe import Recipe, load_recipe
from pipeline.stages import Builder
from pipeline.stages.response_cache import response_cache
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.integrity import check_without_weights
from pipeline.triton.running import RunningServer


@dataclass(frozen=True, slots=True)
class Located:
    """One model: how it was packaged, and where it runs."""

    recipe: Recipe
    package: Path
    urls: tuple[str, ...]  # host:port of the gRPC of each server that runs it

    def describe(self) -> dict[str, Any]:
        """What requests will meet, for people and programs."""
        deployment = Deployment.load(self.package)
        template = template_of(self.package / deployment.tokenizer_dir)
        dialect = dialect_of(template)
        limits, cache = deployment.limits, self.recipe.cache
        return {
            "model": self.recipe.name,
            "endpoints": list(self.urls),
            "entry_model": deployment.entry_model,
            "deployment": deployment.digest,
            "max_input_tokens": limits.max_input_tokens,
            "max_output_tokens": limits.max_output_tokens,
            "max_concurrency": limits.max_concurrency,
            "chat": template is not None,
            "tool_calls": dialect.name if dialect else None,
            "cache": cache.backend.kind if cache.enabled else None,
            "embeddings": cache.enabled and cache.semantic is not None,
        }


def served(one: Located, shelf: Store, *, max_waiting: int) -> Served:
    """The model as the gateway serves it, behind the cache of its recipe.

    Raises:
        UserError: the cache that the recipe asks for cannot be had. DamagedArtifact: the tokenizer, the chat template
        or the limits are not those that were built.
    """
    check_without_weights(one.package, shelf.hashes, Silent())
    cache = response_cache(one.recipe, shelf)
    return Served.of_package(one.recipe.name, one.package, one.urls, cache=cache, max_waiting=max_waiting)


def locate(
    names: Sequence[str],
    overrides: Sequence[str],
    shelf: Store,
    endpoints: Mapping[str, Sequence[str]],
    *,
    wait_s: float = 0.0,
) -> list[Located]:
    """All of them.

    Args:
        endpoints: name of a recipe -> servers elsewhere that run it, now or later.
        wait_s: for how long to wait, in all, until the other recipes are served here.

    Raises:
        InvalidInput: a recipe has faults.
        UserError: with every recipe that is named twice, not built or not served, and every endpoint of none.
    """
    recipes = [load_recipe(name, overrides) for name in names]
    known = [recipe.name for recipe in recipes]
    faults = [f"{name}: is named twice" for name in sorted({name for name in known if known.count(name) > 1})]
    faults += [
        f"--endpoint {name}=…: is none of the recipes ({', '.join(known)})"
        for name in endpoints
        if name not in known
    ]
    found, deadline = [], time.monotonic() + (0 if faults else wait_s)
    for recipe in recipes:
        try:
            urls, left_s = endpoints.get(recipe.name, ()), deadline - time.monotonic()
            found.append(_locate(recipe, shelf, urls, left_s))
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))
    return found


def _locate(recipe: Recipe, shelf: Store, urls: Sequence[str], wait_s: float) -> Located:
    if urls:
        prepared = prepare(recipe, shelf, offline=True)
        package = Builder(prepared, shelf, Silent()).finished().path
        return Located(recipe, package, tuple(urls))
    running = RunningServer.find(shelf.running, recipe.name, wait_s=wait_s)
    if running is None:
        serve = shlex.join(("pipeline", "serve", *recipe.words, *shelf.words))
        elsewhere = f"--endpoint {recipe.name}=HOST:PORT"
        raise UserError(f"{recipe.name}: is not served here; {serve}, or {elsewhere}, or --wait-s")
    return Located(recipe, running.deployment.parent, (running.grpc_url,))
