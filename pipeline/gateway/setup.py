"""From a recipe and the server that runs it to what the gateway serves."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.cache.backend import Backend, BackendDown, Capacity
from pipeline.cache.redaction import Redaction
from pipeline.cache.response_cache import ResponseCache
from pipeline.client import AsyncClient, ChatTemplate
from pipeline.errors import UserError
from pipeline.gateway.admission import Admission
from pipeline.gateway.served import Bounds, Served
from pipeline.recipe import Recipe
from pipeline.recipe import ResponseCache as CacheSettings
from pipeline.triton.deployment import Deployment

CACHE_KEY = "PIPELINE_CACHE_KEY"  # environment: 32 bytes in base64; answers are then kept encrypted


def served(recipe: Recipe, package: Path, url: str, caches: Path, *, max_waiting: int) -> Served:
    """What requests for the recipe's model are answered with.

    Args:
        package: the folder of deployment.json, whose tokenizer and limits are used.
        url: host:port of Triton's gRPC.
        caches: folder of the store in which the response cache lies if the recipe names no place.

    Raises:
        UserError: the cache that the recipe asks for cannot be had.
    """
    from tokenizers import Tokenizer

    deployment = Deployment.load(package)
    tokenizer = package / deployment.tokenizer_dir
    limits = deployment.limits
    return Served(
        name=recipe.name,
        created=int((package / "deployment.json").stat().st_mtime),
        deployment=deployment.digest,
        plain=AsyncClient(url, model=deployment.entry_model, template=ChatTemplate.from_directory(tokenizer)),
        template=ChatTemplate.from_directory(tokenizer),
        tokenizer=Tokenizer.from_file(str(tokenizer / "tokenizer.json")),
        bounds=Bounds(limits.max_input_tokens, limits.max_output_tokens),
        admission=Admission(limits.max_concurrency, max_waiting=max_waiting),
        cache=response_cache(recipe.cache, cache_file(recipe, caches)),
    )


def response_cache(settings: CacheSettings, file: Path) -> ResponseCache | None:
    """The cache that a recipe asks for; None if it is off.

    Raises:
        UserError: it cannot be had.
    """
    if not settings.enabled:
        return None
    if settings.semantic is not None:
        raise UserError("cache.semantic: semantic lookup is not served yet; remove it to use the exact cache")
    try:
        backend = open_backend(settings, file)
    except (BackendDown, ValueError) as error:
        raise UserError(f"the response cache cannot be used: {error}") from error
    return ResponseCache(
        backend, ttl_s=settings.ttl_s, keep_sampled=settings.cache_sampled, keeper=Redaction()
    )


def cache_file(recipe: Recipe, caches: Path) -> Path:
    """Where the embedded cache of a recipe lies: where it says, or in the store."""
    backend = recipe.cache.backend
    named = backend.path if backend.kind == "sqlite" else None
    return Path(named).expanduser() if named else caches / "responses" / f"{recipe.name}.db"


def open_backend(settings: CacheSettings, file: Path) -> Backend:
    """The backend that a recipe names; `file` is where the embedded one lies.

    Raises:
        BackendDown: it cannot be used. ValueError: the key in the environment is none.
    """
    from pipeline.cache.sealing import Sealed
    from pipeline.cache.sqlite import SqliteBackend

    if settings.backend.kind == "redis":
        raise ValueError("backend redis is not served yet; use sqlite")
    capacity = Capacity(settings.max_entries, settings.max_mib * 2**20)
    secret = os.environ.get(CACHE_KEY)
    return SqliteBackend(file, capacity, codec=Sealed(secret) if secret else None)
