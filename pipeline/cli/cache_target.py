"""The cache that a `pipeline cache` command is about: that of a RECIPE, or the one at an ADDRESS."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cache.backend import Backend, BackendDown
from pipeline.cache.near_hits import NEAR_HITS, NearHitLog, near_hits_place
from pipeline.cache.redaction import Redaction
from pipeline.cache.setup import make_backend, make_near_hits, make_redaction
from pipeline.cli.options import complete_deployment, set_option, store_option
from pipeline.errors import UserError
from pipeline.extras import missing

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_ADDRESS = re.compile(r"://|\.db$")


@dataclass(frozen=True, slots=True)
class CacheTarget:
    """The cache that a command is about."""

    text: str  # a recipe, or an address
    overrides: tuple[str, ...]
    store: Path | None
    name: str

    @contextmanager
    def opened(self) -> Iterator[Backend]:
        """Its backend. Raises UserError where there is none, or it cannot be used."""
        with _usable(BackendDown, ValueError):
            backend = self._of_address() if self._is_address else self._of_recipe()
        try:
            with _usable(BackendDown):
                yield backend
        finally:
            backend.close()

    @contextmanager
    def near_hits(self) -> Iterator[NearHitLog]:
        """Its near hits that were served; none where it never kept any. Raises UserError if they cannot be read."""
        with _usable(BackendDown, ValueError):
            log = self._near_hits()
        try:
            with _usable(BackendDown):
                yield log
        finally:
            log.close()

    def redaction(self) -> Redaction:
        """What it may not keep: what the recipe says, all known kinds at an address. Raises UserError."""
        try:
            return Redaction() if self._is_address else make_redaction(self._recipe().cache)
        except ImportError as error:
            raise missing("redaction", error, "cache") from error
        except ValueError as error:
            raise UserError(f"redaction: {error}") from error

    @property
    def _is_address(self) -> bool:
        return _ADDRESS.search(self.text) is not None

    def _of_address(self) -> Backend:
        from pipeline.cache.backends import file_of, is_file, open_backend
        from pipeline.cache.encryption import load_codec
        from pipeline.machine.packages import require
        from pipeline.stages.response_cache import needs_of_backend

        require("this response cache", needs_of_backend(self.text))
        if is_file(self.text) and not file_of(self.text).is_file():
            raise UserError(f"there is no response cache ({file_of(self.text)})")
        return open_backend(self.text, name=self.name, codec=load_codec())

    def _of_recipe(self) -> Backend:
        from pipeline.machine.packages import require
        from pipeline.stages.response_cache import cache_place, needs_of_backend
        from pipeline.store import Store

        recipe = self._recipe()
        place = cache_place(recipe, Store.at(self.store))
        if isinstance(place, Path) and not place.is_file():
            raise UserError(f"{recipe.name} has no response cache here yet ({place})")
        encrypted = recipe.cache.encryption is not None
        require(f"{recipe.name}: its response cache", needs_of_backend(place, encrypted=encrypted))
        return make_backend(recipe.cache, place, name=recipe.name)

    def _near_hits(self) -> NearHitLog:
        from pipeline.cache.backends import file_of, is_file, open_backend
        from pipeline.cache.encryption import load_codec
        from pipeline.cache.in_memory import InMemoryBackend
        from pipeline.stages.response_cache import cache_place
        from pipeline.store import Store

        recipe = None if self._is_address else self._recipe()
        place = self.text if recipe is None else cache_place(recipe, Store.at(self.store))
        where, name = near_hits_place(place, self.name)
        if is_file(where) and not file_of(where).is_file():
            return NearHitLog(InMemoryBackend())
        if recipe is None:
            return NearHitLog(open_backend(where, NEAR_HITS, name=name, codec=load_codec()))
        return make_near_hits(recipe.cache, place, name=recipe.name)

    def _recipe(self) -> Recipe:
        from pipeline.serving.deployments import find_deployment
        from pipeline.store import Store
        from pipeline.triton.running import SUPERVISED

        return find_deployment(self.text, self.overrides, Store.at(self.store), states=SUPERVISED).recipe


@contextmanager
def _usable(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise UserError(f"the response cache cannot be used: {error}") from error


def of_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """RECIPE or ADDRESS, with what belongs to it, as `target`."""

    @click.argument("cache", metavar="RECIPE|ADDRESS", shell_complete=complete_deployment)
    @click.option(
        "--name",
        default="pipeline",
        show_default=True,
        metavar="NAME",
        help="Which cache of a server, if its ADDRESS is given: mostly the name of a recipe.",
    )
    @set_option
    @store_option
    @wraps(function)
    def of_target(
        *args: Any, cache: str, name: str, overrides: tuple[str, ...], store: Path | None, **kwargs: Any
    ) -> Any:
        return function(*args, target=CacheTarget(cache, overrides, store, name), **kwargs)

    return of_target


def utc_time(seconds: float) -> str:
    """Write a time, in seconds since the epoch, as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
