"""From a recipe and the server that runs it to what the gateway serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.cache.backend import Backend, BackendDown, Capacity
from pipeline.cache.backends import open_backend
from pipeline.cache.redaction import Redaction
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.sealing import codec_of
from pipeline.client import AsyncClient, ChatTemplate
from pipeline.errors import UserError
from pipeline.gateway.admission import Admission
from pipeline.gateway.served import Bounds, Served
from pipeline.recipe import Recipe
from pipeline.triton.deployment import Deployment


def served(recipe: Recipe, package: Path, url: str | Sequence[str], caches: Path, *, max_waiting: int) -> Served:
    """What requests for the recipe's model are answered with.

    Args:
        package: the folder of deployment.json, whose tokenizer and limits are used.
        url: host:port of Triton's gRPC; several if several servers run it.
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
        cache=response_cache(recipe, caches),
    )


def response_cache(recipe: Recipe, caches: Path) -> ResponseCache | None:
    """The cache that a recipe asks for; None if it is off.

    Raises:
        UserError: it cannot be had.
    """
    settings = recipe.cache
    if not settings.enabled:
        return None
    if settings.semantic is not None:
        raise UserError("cache.semantic: semantic lookup is not served yet; remove it to use the exact cache")
    try:
        backend = recipe_backend(recipe, caches)
    except (BackendDown, ValueError) as error:
        raise UserError(f"the response cache cannot be used: {error}") from error
    return ResponseCache(
        backend, ttl_s=settings.ttl_s, keep_sampled=settings.cache_sampled, keeper=Redaction()
    )


def recipe_backend(recipe: Recipe, caches: Path) -> Backend:
    """The backend that a recipe names.

    Raises:
        BackendDown: it cannot be used. ValueError: its address is wrong, or the key in the environment is none.
    """
    settings = recipe.cache
    capacity = Capacity(settings.max_entries, settings.max_mib * 2**20)
    return open_backend(cache_place(recipe, caches), capacity, name=recipe.name, codec=codec_of())


def cache_place(recipe: Recipe, caches: Path) -> Path | str:
    """Where a recipe's answers are kept: a server, the file that it names, or one in the store."""
    backend = recipe.cache.backend
    if backend.kind != "sqlite":
        return backend.url
    return Path(backend.path).expanduser() if backend.path else caches / "responses" / f"{recipe.name}.db"
