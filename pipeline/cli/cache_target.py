"""The cache that a `pipeline cache` command is about: that of a RECIPE, or the cache at an ADDRESS."""

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
from pipeline.cache.backends import file_of, is_file, open_backend
from pipeline.cache.near_hits import NearHitLog, near_hits_place
from pipeline.cache.redaction import Redaction
from pipeline.cache.setup import make_backend, make_near_hits, make_redaction
from pipeline.cli.options import complete_deployment, open_store, set_option
from pipeline.errors import UserError
from pipeline.extras import missing

if TYPE_CHECKING:
    from pipeline.recipe import CacheSettings

_ADDRESS = re.compile(r"://|\.db(#|$)")


@dataclass(frozen=True, slots=True)
class CacheTarget:
    """The cache that a command is about.

    Attributes:
        text: a recipe, or an address; behind # the name of the cache on the server, which may have several.
    """

    text: str
    overrides: tuple[str, ...]

    @contextmanager
    def opened(self) -> Iterator[Backend]:
        """Open its backend. Raises UserError where there is none, or it cannot be used."""
        from pipeline.machine.packages import require
        from pipeline.stages.response_cache import needs_of_backend

        with _usable(BackendDown, ValueError):
            settings, place, name = self._located()
            if not _exists(place):
                problem = (
                    "there is no response cache"
                    if self._is_address
                    else f"{name} has no response cache here yet"
                )
                raise UserError(f"{problem} ({file_of(place)})")
            subject = "this response cache" if self._is_address else f"{name}: its response cache"
            require(subject, needs_of_backend(place, encrypted=settings.encryption is not None))
            backend = make_backend(settings, place, name=name)
        try:
            with _usable(BackendDown):
                yield backend
        finally:
            backend.close()

    @contextmanager
    def near_hits(self) -> Iterator[NearHitLog]:
        """Open its near hits; there are none where it never kept any. Raises UserError if they cannot be read."""
        with _usable(BackendDown, ValueError):
            settings, place, name = self._located()
            exists = _exists(near_hits_place(place, name)[0])
            log = (
                make_near_hits(settings, place, name=name)
                if exists
                else NearHitLog(open_backend("memory://"))
            )
        try:
            with _usable(BackendDown):
                yield log
        finally:
            log.close()

    def redaction(self) -> Redaction:
        """Make its redaction; all known kinds at an address. Raises UserError."""
        try:
            return make_redaction(self._located()[0])
        except ImportError as error:
            raise missing("redaction", error, "cache") from error
        except ValueError as error:
            raise UserError(f"redaction: {error}") from error

    @property
    def _is_address(self) -> bool:
        return _ADDRESS.search(self.text) is not None

    def _located(self) -> tuple[CacheSettings, str | Path, str]:
        """Settings, place and name; an address has default settings."""
        from pipeline.recipe import CacheSettings
        from pipeline.serving.deployments import find_deployment
        from pipeline.stages.response_cache import cache_place
        from pipeline.triton.running import SUPERVISED

        if self._is_address:
            address, _, name = self.text.partition("#")
            return CacheSettings(), address, name or "pipeline"
        store = open_store()
        recipe = find_deployment(self.text, self.overrides, store, states=SUPERVISED).recipe
        return recipe.cache, cache_place(recipe, store), recipe.name


def _exists(place: str | Path) -> bool:
    """Whether there is a cache at a place; a server is not asked."""
    return not is_file(place) or file_of(place).is_file()


@contextmanager
def _usable(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise UserError(f"the response cache cannot be used: {error}") from error


def of_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command RECIPE or ADDRESS with its options, as the argument `target`."""

    @click.argument("cache", metavar="RECIPE|ADDRESS", shell_complete=complete_deployment)
    @set_option
    @wraps(function)
    def of_target(*args: Any, cache: str, overrides: tuple[str, ...], **kwargs: Any) -> Any:
        return function(*args, target=CacheTarget(cache, overrides), **kwargs)

    return of_target


def utc_time(seconds: float) -> str:
    """Write a time, in seconds since the epoch, as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
