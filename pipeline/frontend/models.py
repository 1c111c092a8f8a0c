"""Models of a gateway: finds the package and the Triton servers of each recipe, and loads and follows it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.gateway.api.tools.prompt import answer_format, load_chat_template
from pipeline.gateway.record_follower import RecordFollower
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.settings import GatewayStart
from pipeline.gateway.workers.worker import GatewayWorker
from pipeline.prepare import prepare
from pipeline.progress import Silent
from pipeline.recipe import Recipe, load_recipe
from pipeline.serving.deployments import NamedDeployment, find_deployment, served_recipe
from pipeline.serving.live import kv_cache_usage
from pipeline.stages import Builder
from pipeline.stages.response_cache import open_response_cache
from pipeline.store import Store
from pipeline.triton.deployment import Deployment, package_recipe
from pipeline.triton.repository import check_without_weights
from pipeline.triton.running import SUPERVISED, RunningServer


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """One model: its package, and where it runs.

    Attributes:
        urls: host:port of the gRPC of each server that runs it, or dns:NAME:PORT.
        record: record of the server, where it was found by the name of its recipe.
    """

    recipe: Recipe
    package: Path
    urls: tuple[str, ...]
    record: RunningServer | None = None

    def describe(self) -> dict[str, Any]:
        """Describe what requests will meet: names, limits, chat, tool calls, cache, embeddings."""
        deployment = Deployment.load(self.package)
        template = load_chat_template(
            self.package / deployment.tokenizer_dir, tool_section=self.recipe.tool_prompt == "auto"
        )
        answers = answer_format(template, frozenset())
        limits, cache = deployment.limits, self.recipe.cache
        return {
            "model": self.recipe.name,
            "aliases": list(self.recipe.serving.aliases),
            "adapters": list(deployment.adapters),
            "strict": self.recipe.serving.strict,
            "endpoints": list(self.urls),
            "entry_model": deployment.entry_model,
            "deployment": deployment.digest,
            "max_input_tokens": limits.max_input_tokens,
            "max_output_tokens": limits.max_output_tokens,
            "max_concurrency": limits.max_concurrency,
            "chat": template is not None,
            "tool_calls": answers.dialect.name if answers.dialect else None,
            "reasoning": answers.reasons,
            "cache": cache.backend.kind if cache.enabled else None,
            "embeddings": cache.enabled and cache.semantic is not None,
        }


def load_served_model(
    located: LocatedModel, *, store: Store, start: GatewayStart, worker: GatewayWorker | None = None
) -> ServedModel:
    """Load a model for the gateway, behind the response cache of its recipe.

    Args:
        store: Store of artifacts, and of the cache's files.
        worker: Worker that shares queue and readiness of the model; None if this process serves the gateway alone.

    Raises:
        UserError: the cache that the recipe asks for cannot be opened.
        DamagedArtifact: the tokenizer, the chat template or the limits are not those that were built.
    """
    check_without_weights(located.package, store.hashes, Silent())
    model = ServedModel.from_package(
        located.recipe,
        located.package,
        located.urls,
        cache=open_response_cache(located.recipe, store),
        settings=start.settings,
    )
    if worker is not None:
        worker.share(model)
    return model


def read_kv_cache_usage(followers: Iterable[RecordFollower]) -> dict[str, float]:
    """Read how full the KV cache of each engine is, from the metrics pages of Tritons on this machine.

    Returns:
        Name of a model -> 0 to 1; without those whose page does not say it.
    """
    urls = {follower.name: follower.metrics_url for follower in followers}
    usages = {name: kv_cache_usage(url) for name, url in urls.items() if url is not None}
    return {name: usage for name, usage in usages.items() if usage is not None}


def record_followers(
    located: Iterable[LocatedModel], store: Store, load: Callable[[LocatedModel], ServedModel]
) -> list[RecordFollower]:
    """Make what keeps models up to date, for those that were found by the names of their recipes."""

    def follower(model: LocatedModel, record: RunningServer) -> RecordFollower:
        def reload(now: RunningServer) -> ServedModel:
            recipe = model.recipe if now.settings is None else served_recipe(model.recipe.name, now)
            return load(LocatedModel(recipe, now.deployment.parent, (now.target,), now))

        return RecordFollower(model.recipe.name, store.running, record, reload)

    return [follower(model, model.record) for model in located if model.record is not None]


def locate_models(start: GatewayStart, store: Store) -> list[LocatedModel]:
    """Find the package and the servers of each recipe, which is waited for as long as `sources.wait_s` says.

    Raises:
        InvalidInput: a recipe has faults.
        UserError: with every recipe that is named twice, not built or not served, every endpoint of none, and every
            name that several models have.
    """
    sources = start.sources
    deadline = time.monotonic() + sources.wait_s
    endpoints: dict[str, tuple[str, ...]] = {}
    for name, url in sources.endpoints:
        endpoints[name] = (*endpoints.get(name, ()), url)
    if sources.package is not None:
        return [_locate_package(start, sources.package, endpoints)]
    named = [
        find_deployment(
            name, start.overrides, store, states=SUPERVISED, wait_s=0 if endpoints else sources.wait_s
        )
        for name in start.recipes
    ]
    known = [deployment.recipe.name for deployment in named]
    if "" in endpoints and len(known) == 1:
        endpoints = {known[0]: (*endpoints.get(known[0], ()), *endpoints[""])}
    faults = [f"{name}: is named twice" for name in sorted({name for name in known if known.count(name) > 1})]
    faults += [
        f"--endpoint {name}=…: is none of the recipes ({', '.join(known)})"
        for name in endpoints
        if name not in known
    ]
    located = []
    for deployment in named:
        try:
            left_s = 0.0 if faults else deadline - time.monotonic()
            urls = endpoints.get(deployment.recipe.name, ())
            located.append(_locate(deployment, store, urls, left_s))
        except UserError as error:
            faults.append(str(error))
    faults += _faults_of_aliases([model.recipe for model in located])
    if faults:
        raise UserError("\n".join(faults))
    return located


def _faults_of_aliases(recipes: Sequence[Recipe]) -> list[str]:
    """Find names that would mean several models."""
    by_name: dict[str, list[str]] = {}
    for recipe in recipes:
        for name in recipe.served_names:
            by_name.setdefault(name, []).append(recipe.name)
    return [
        f"{name}: is a name of {' and of '.join(owners)}: change serving.aliases"
        for name, owners in by_name.items()
        if len(owners) > 1
    ]


def _locate_package(
    start: GatewayStart, package: Path, endpoints: Mapping[str, Sequence[str]]
) -> LocatedModel:
    names, overrides = start.recipes, start.overrides
    if len(names) > 1:
        raise UserError("--package is that of one RECIPE")
    recipe = load_recipe(names[0], overrides) if names else package_recipe(package, overrides)
    served = Deployment.load(package).name
    if recipe.name != served:
        raise UserError(f"{package} is the package of {served}, not of {recipe.name}")
    urls = [url for name, known in endpoints.items() if name in ("", recipe.name) for url in known]
    if not urls or len(endpoints) > 1:
        raise UserError(f"--package needs the servers of {recipe.name}: --endpoint {recipe.name}=HOST:PORT")
    return LocatedModel(recipe, package, tuple(urls))


def _locate(named: NamedDeployment, store: Store, urls: Sequence[str], wait_s: float) -> LocatedModel:
    recipe = named.recipe
    if urls and named.as_served and named.server is not None:
        return LocatedModel(recipe, named.server.deployment.parent, tuple(urls))
    if urls:
        prepared = prepare(recipe, store, offline=True)
        package = Builder(prepared, store, Silent()).finished().path
        return LocatedModel(recipe, package, tuple(urls))
    running = named.server or RunningServer.find(store.running, recipe.name, wait_s=wait_s, states=SUPERVISED)
    if running is None:
        serve = shlex.join(("pipeline", "serve", *named.argv))
        elsewhere = f"--endpoint {recipe.name}=HOST:PORT"
        raise UserError(f"{recipe.name}: is not served here; {serve}, or {elsewhere}, or --wait-s")
    return LocatedModel(recipe, running.deployment.parent, (running.target,), running)
