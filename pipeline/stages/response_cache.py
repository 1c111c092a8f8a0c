"""The response cache that a recipe's `cache` section asks for, with its sentence encoder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.cache.backend import Capacity
from pipeline.cache.encryption import KEY, Secret
from pipeline.cache.lifetime import DYNAMIC_WHEN, Lifetime
from pipeline.cache.pgvector.database import SCHEMES as POSTGRES
from pipeline.cache.redis.address import SCHEMES as REDIS
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.setup import CacheSettings, CacheSetupError, SemanticSettings, open_cache
from pipeline.errors import UserError
from pipeline.machine.packages import Need, require
from pipeline.progress import Progress
from pipeline.recipe import HubSource, Recipe
from pipeline.sources import find_fetched
from pipeline.store import Store


def response_cache(recipe: Recipe, store: Store, progress: Progress | None = None) -> ResponseCache | None:
    """The cache of a recipe, ready; None if it is off. `progress` tells of an encoder that is brought first.

    Raises:
        UserError: it cannot be had; the text tells all that is wrong.
    """
    settings = recipe.cache
    if not settings.enabled:
        return None
    require(f"{recipe.name}: its response cache", needs_of_cache(recipe, store))
    semantic = None
    if settings.semantic is not None:
        from pipeline.stages.embedder import encoder

        found = encoder(recipe, store, progress)
        wanted = settings.semantic
        semantic = SemanticSettings(
            found.folder,
            wanted.min_similarity,
            found.name,
            wanted.checks,
            wanted.scorer,
            wanted.min_score,
        )
    try:
        return open_cache(cache_settings(recipe, store, semantic))
    except CacheSetupError as error:
        faults = str(error).replace("\n", "\n  ")
        raise UserError(f"{recipe.name}: the response cache cannot be used:\n  {faults}") from error


def needs_of_cache(recipe: Recipe, store: Store) -> Iterator[Need]:
    """What the cache of a recipe imports, to answer requests; nothing if it is off."""
    settings = recipe.cache
    if not settings.enabled:
        return
    yield from needs_of_backend(cache_place(recipe, store), sealed=settings.encryption is not None)
    if settings.semantic is not None:
        yield Need("cache", "cache.semantic", frozenset({"faiss-cpu", "onnxruntime", "tokenizers"}))
        source, revision = settings.semantic.embedder, settings.semantic.embedder_revision
        if isinstance(source, HubSource) and find_fetched(source, revision, store) is None:
            yield Need("hub", "cache.semantic.embedder")


def needs_of_backend(place: Path | str, *, sealed: bool = False) -> Iterator[Need]:
    """What keeping answers at a place imports. `sealed`: with a key; also if the environment has one."""
    scheme = "" if isinstance(place, Path) else place.partition("://")[0]
    if scheme in REDIS:
        yield Need("cache", f"{scheme}://", frozenset({"redis"}))
    elif scheme in POSTGRES:
        yield Need("pgvector", f"{scheme}://")
    if sealed or os.environ.get(KEY):
        yield Need("cache", "encryption", frozenset({"cryptography"}))


def cache_settings(recipe: Recipe, store: Store, semantic: SemanticSettings | None = None) -> CacheSettings:
    """The section as the cache takes it; what needs an encoder only if one is given."""
    settings, dynamic = recipe.cache, recipe.cache.dynamic
    return CacheSettings(
        cache_place(recipe, store),
        name=recipe.name,
        capacity=Capacity(settings.max_entries, settings.max_mib * 2**20),
        lifetime=Lifetime(
            settings.ttl_s, dynamic.ttl_s, DYNAMIC_WHEN if dynamic.when is None else dynamic.when
        ),
        keep_sampled=settings.cache_sampled,
        pace=settings.replay_pace,
        redact=settings.redaction.kinds,
        redact_patterns={own.name: own.pattern for own in settings.redaction.patterns},
        phone_regions=settings.redaction.phone_regions,
        secret=_secret(recipe),
        semantic=semantic,
    )


def cache_place(recipe: Recipe, store: Store) -> Path | str:
    """Where a recipe's answers are kept: a server, the file that it names, or one in the store."""
    backend = recipe.cache.backend
    if backend.kind != "sqlite":
        return backend.url
    return (
        Path(backend.path).expanduser() if backend.path else store.caches / "responses" / f"{recipe.name}.db"
    )


def _secret(recipe: Recipe) -> Secret:
    encryption = recipe.cache.encryption
    if encryption is None:
        return Secret()
    if encryption.key_file is not None:
        return Secret(file=Path(encryption.key_file), required=True)
    return Secret(variable=encryption.key_env or "", required=True)
