"""The sentence encoder of a recipe's response cache: a folder that `pipeline.cache.semantic.embedder` reads.

A local folder that holds a graph is taken as it is. From a checkpoint, on the Hub or local, the graph is made once and
kept in the store: in 8 bits where that agrees with 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UserError
from pipeline.extras import missing
from pipeline.plan.plan import REVISIONS
from pipeline.progress import Progress, Silent
from pipeline.recipe import HubSource, LocalSource, Recipe
from pipeline.sources import resolve_checkpoint
from pipeline.stages.fetch import fetch
from pipeline.store import ArtifactKey, Json, Store

_REVISION = 2  # of the way in which graphs are made


@dataclass(frozen=True, slots=True)
class Encoder:
    """A sentence encoder, ready to be loaded."""

    folder: Path
    name: str  # such as all-MiniLM-L6-v2


@dataclass(frozen=True, slots=True)
class _Asked:
    source: HubSource | LocalSource
    revision: str | None
    allow_pickle: bool = False


def encoder(recipe: Recipe, store: Store, progress: Progress | None = None) -> Encoder:
    """The encoder that `cache.semantic` names, brought and made if it is not there yet.

    Raises:
        SourceError: the checkpoint cannot be had. UserError: it is no encoder that can be taken, or a distribution
        that makes graphs is missing.
    """
    settings = recipe.cache.semantic
    assert settings is not None, "asked for only where there is semantic lookup"
    source = settings.embedder
    if isinstance(source, LocalSource) and _is_ready(source.path):
        return Encoder(source.path, source.path.name)
    report = progress or Silent()
    asked = _Asked(source, settings.embedder_revision)
    resolved = resolve_checkpoint(asked, store=store, progress=report)
    fetched = store.obtain(
        ArtifactKey("fetch", settings={"revision": REVISIONS["fetch"], **resolved.identity}, resumable=True),
        lambda folder: fetch(resolved, folder, progress=report),
        recipe=recipe.name,
        progress=report,
    )

    def make(folder: Path) -> dict[str, Json]:
        return _graph(fetched.path, folder, resolved.label)

    key = ArtifactKey("encoder", settings={"revision": _REVISION}, inputs={"checkpoint": fetched.digest})
    made = store.obtain(key, make, recipe=recipe.name, progress=report)
    name = source.repo.rpartition("/")[2] if isinstance(source, HubSource) else source.path.name
    return Encoder(made.path, name)


def _is_ready(folder: Path) -> bool:
    from pipeline.cache.semantic.embedder import GRAPHS

    return any((folder / name).is_file() for name in GRAPHS)


def _graph(checkpoint: Path, into: Path, label: str) -> dict[str, Json]:
    try:
        from pipeline.cache.semantic.preparing import prepare

        agreement = prepare(checkpoint, into)
    except ImportError as error:
        raise missing(f"{label}: making its graph", error, "cache") from error
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            f"cache.semantic.embedder: {label} is no encoder that can be used: {error}"
        ) from error
    return {"source": label, "agreement_int8": agreement}
