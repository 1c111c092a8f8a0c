"""The response cache that a recipe's `cache` section asks for, with its sentence encoder.

A local folder that holds a graph is taken as it is. From a checkpoint, on the Hub or local, the graph of an encoder is
made once and kept in the store: in 8 bits where that agrees with 32. Of a cross-encoder on the Hub, it is the published
graph that is kept so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.cache.encryption import KEY
from pipeline.cache.postgres import SCHEMES as POSTGRES
from pipeline.cache.redis_server import SCHEMES as REDIS
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.setup import CacheSetupError, SentenceEncoder, open_cache
from pipeline.errors import UserError
from pipeline.extras import missing
from pipeline.machine.packages import Need, require
from pipeline.plan.plan import REVISIONS
from pipeline.progress import Progress, Silent
from pipeline.recipe import HubSource, LocalSource, Recipe
from pipeline.sources import find_fetched, resolve_checkpoint
from pipeline.stages.fetch import fetch
from pipeline.store import ArtifactKey, Json, Store

# Revisions of the way in which graphs are made.
_REVISIONS = {"encoder": 2, "verifier": 1}


def open_response_cache(
    recipe: Recipe, store: Store, progress: Progress | None = None
) -> ResponseCache | None:
    """Open the cache of a recipe, and make its encoder first if need be.

    Returns:
        The cache, or None if the recipe does not enable one.

    Raises:
        UserError: something is wrong or missing; the text names all of it.
    """
    settings = recipe.cache
    if not settings.enabled:
        return None
    require(f"{recipe.name}: its response cache", needs_of_cache(recipe, store))
    encoder = None if settings.semantic is None else obtain_encoder(recipe, store, progress)
    verifier = obtain_verifier(recipe, store, progress)
    try:
        return open_cache(
            settings, cache_place(recipe, store), name=recipe.name, encoder=encoder, cross_encoder=verifier
        )
    except CacheSetupError as error:
        faults = str(error).replace("\n", "\n  ")
        raise UserError(f"{recipe.name}: the response cache cannot be used:\n  {faults}") from error


def cache_place(recipe: Recipe, store: Store) -> Path | str:
    """Return the place of the answers: the address of a server, the file that the recipe names, or one in the store."""
    backend = recipe.cache.backend
    if backend.kind != "sqlite":
        return backend.url
    return (
        Path(backend.path).expanduser() if backend.path else store.caches / "responses" / f"{recipe.name}.db"
    )


def needs_of_cache(recipe: Recipe, store: Store) -> Iterator[Need]:
    """List the packages that a gateway imports for the cache of a recipe.

    A server that the recipe names has the state of gateways (`pipeline.gateway.state`) also where the cache is off.
    """
    settings = recipe.cache
    if settings.enabled or settings.backend.kind != "sqlite":
        yield from needs_of_backend(cache_place(recipe, store), encrypted=settings.encryption is not None)
    if settings.enabled and settings.semantic is not None:
        yield Need("cache", "cache.semantic", frozenset({"faiss-cpu", "onnxruntime", "tokenizers"}))
        semantic = settings.semantic
        sources = (
            ("embedder", semantic.embedder, semantic.embedder_revision, False),
            ("verifier", semantic.verifier, semantic.verifier_revision, True),
        )
        for key, source, revision, graph in sources:
            if isinstance(source, HubSource) and find_fetched(source, revision, store, graph=graph) is None:
                yield Need("hub", f"cache.semantic.{key}")


def needs_of_backend(place: Path | str, *, encrypted: bool = False) -> Iterator[Need]:
    """List the packages that keeping answers at a place imports.

    Args:
        place: a file, or the address of a server.
        encrypted: whether the recipe names a key; a key in the environment counts as well.
    """
    scheme = "" if isinstance(place, Path) else place.partition("://")[0]
    if scheme in REDIS:
        yield Need("cache", f"{scheme}://", frozenset({"redis"}))
    elif scheme in POSTGRES:
        yield Need("pgvector", f"{scheme}://")
    if encrypted or os.environ.get(KEY):
        yield Need("cache", "encryption", frozenset({"cryptography"}))


@dataclass(frozen=True, slots=True)
class _EncoderCheckpoint:
    """Fields of a model that `resolve_checkpoint` reads."""

    source: HubSource | LocalSource
    revision: str | None
    allow_pickle: bool = False


def obtain_encoder(recipe: Recipe, store: Store, progress: Progress | None = None) -> SentenceEncoder:
    """Fetch and make the encoder that `cache.semantic` names, unless the store has it.

    Raises:
        SourceError: the checkpoint cannot be fetched.
        UserError: it is not an encoder that can be used, or a distribution that makes graphs is missing.
    """
    settings = recipe.cache.semantic
    assert settings is not None, "called only where there is semantic lookup"
    source = settings.embedder
    name = source.repo.rpartition("/")[2] if isinstance(source, HubSource) else source.path.name
    folder = _obtain("encoder", source, settings.embedder_revision, recipe, store, progress)
    return SentenceEncoder(folder, name)


def obtain_verifier(recipe: Recipe, store: Store, progress: Progress | None = None) -> Path | None:
    """Fetch and make the cross-encoder that `cache.semantic.verifier` names, unless the store has it.

    Returns:
        Its folder, as `CrossEncoder` reads it; None if the recipe names none.

    Raises:
        SourceError: it cannot be fetched.
        UserError: it is not a cross-encoder that can be used, or a distribution that makes graphs is missing.
    """
    settings = recipe.cache.semantic
    if settings is None or settings.verifier is None:
        return None
    return _obtain("verifier", settings.verifier, settings.verifier_revision, recipe, store, progress)


def _obtain(
    role: Literal["encoder", "verifier"],
    source: HubSource | LocalSource,
    revision: str | None,
    recipe: Recipe,
    store: Store,
    progress: Progress | None,
) -> Path:
    """Return the folder with the graph of a model: a local one as it is, else one made of the checkpoint."""
    from pipeline.cache.semantic import cross_encoder, embedder

    graphs = embedder.GRAPHS if role == "encoder" else cross_encoder.GRAPHS
    if isinstance(source, LocalSource) and any((source.path / name).is_file() for name in graphs):
        return source.path
    report = progress or Silent()
    resolved = resolve_checkpoint(_EncoderCheckpoint(source, revision), store=store, progress=report)
    # Published cross-encoders are of many families, of which ours makes graphs of one: their own graph is taken.
    graph = role == "verifier" and isinstance(source, HubSource)
    wanted: dict[str, Json] = {"graph": True} if graph else {}
    fetched = store.obtain(
        ArtifactKey(
            "fetch", settings={"revision": REVISIONS["fetch"], **resolved.identity, **wanted}, resumable=True
        ),
        lambda folder: fetch(resolved, folder, progress=report, graph=graph),
        recipe=recipe.name,
        progress=report,
    )
    made = store.obtain(
        ArtifactKey(role, settings={"revision": _REVISIONS[role]}, inputs={"checkpoint": fetched.digest}),
        lambda folder: _make_graph(role, fetched.path, folder, resolved.label),
        recipe=recipe.name,
        progress=report,
    )
    return made.path


def _make_graph(
    role: Literal["encoder", "verifier"], checkpoint: Path, into: Path, label: str
) -> dict[str, Json]:
    try:
        from pipeline.cache.semantic.onnx_export import export_cross_encoder, export_encoder

        if role == "encoder":
            return {"source": label, "agreement_int8": export_encoder(checkpoint, into)}
        return {"source": label, "difference_int8": export_cross_encoder(checkpoint, into)}
    except ImportError as error:
        raise missing(f"{label}: making its graph", error, "cache") from error
    except (ValueError, KeyError, OSError) as error:
        problem = (
            "embedder: {} is not an encoder" if role == "encoder" else "verifier: {} is not a cross-encoder"
        )
        raise UserError(f"cache.semantic.{problem.format(label)} that can be used: {error}") from error
