"""Where a gateway keeps files, batches and stored responses: with what the deployment has already.

| the deployment has | files and batches | stored responses |
| --- | --- | --- |
| PostgreSQL: a recipe with `cache.backend` of kind pgvector | there | there |
| Redis or Valkey: `--limits-redis`, by which several gateways share limits | refused | there |
| Redis or Valkey: a recipe with `cache.backend` of kind redis | a folder | there |
| neither: the gateway serves alone | a folder | its memory |

A folder that is named (`--batch-folder`) is taken in any case. Files and batches are not put into Redis: it may forget.
What a server is given is encrypted as the response cache of the recipe is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cache.encryption import Codec
from pipeline.cache.redis.server import RedisAddress
from pipeline.cache.setup import load_codec_of
from pipeline.gateway.api.batches.places import BatchFolder, PostgresBatches
from pipeline.gateway.api.batches.rows import BATCH_TABLES, CONTENT_TABLES
from pipeline.gateway.api.batches.storage import BatchStorage, StorageLimits
from pipeline.gateway.api.responses.redis import RedisStoredResponses
from pipeline.gateway.api.responses.stored import (
    RESPONSE_TABLES,
    NoStoredResponses,
    SqlStoredResponses,
    StoredResponseLimits,
    StoredResponses,
)
from pipeline.gateway.state.postgres import PostgresDatabase

if TYPE_CHECKING:
    from pipeline.recipe import CacheSettings


@dataclass(frozen=True, slots=True)
class StateSettings:
    """What the command line says of a gateway's state.

    Attributes:
        redis: server by which several gateways share limits; None if this gateway serves alone.
        folder: folder of files and batches; None to choose by what there is.
        own_folder: folder of files and batches of a gateway that serves alone.
        files: bounds of files and batches.
        responses: bounds of stored responses.
        responses_file: database that the workers of a gateway share, where stored responses are on no server; None for
            the memory of this process.
    """

    redis: RedisAddress | None
    folder: Path | None
    own_folder: Path
    files: StorageLimits
    responses: StoredResponseLimits
    responses_file: Path | None = None


def open_state(
    caches: Sequence[CacheSettings], settings: StateSettings
) -> tuple[BatchStorage | None, StoredResponses]:
    """Choose where state is kept. No server is contacted yet.

    Args:
        caches: `cache` sections of the recipes that are served; servers that they name are used whether or not answers
            are cached there.
        settings: settings of the command line.

    Returns:
        Storage of files and batches, None where they are refused; stored responses.

    Raises:
        ValueError: a key is missing or malformed, or a distribution is missing.
    """
    database = _postgres(caches)
    if settings.folder is not None:
        batches = BatchStorage(BatchFolder(settings.folder), settings.files)
    elif database is not None:
        batches = BatchStorage(PostgresBatches(database), settings.files)
    elif settings.redis is not None:
        return None, _responses(caches, settings, None)
    else:
        batches = BatchStorage(BatchFolder(settings.own_folder), settings.files)
    return batches, _responses(caches, settings, database)


def _postgres(caches: Sequence[CacheSettings]) -> PostgresDatabase | None:
    for cache in caches:
        if cache.backend.kind == "pgvector":
            tables = BATCH_TABLES + CONTENT_TABLES + RESPONSE_TABLES
            return PostgresDatabase(cache.backend.url, load_codec_of(cache), tables)
    return None


def _responses(
    caches: Sequence[CacheSettings], settings: StateSettings, database: PostgresDatabase | None
) -> StoredResponses:
    limits = settings.responses
    if not limits.count:
        return NoStoredResponses()
    if database is not None:
        return SqlStoredResponses(database, limits)
    for cache in caches:
        if cache.backend.kind == "redis":
            return RedisStoredResponses(RedisAddress.parse(cache.backend.url), load_codec_of(cache), limits)
    if settings.redis is not None:
        return RedisStoredResponses(settings.redis, _any_codec(caches), limits)
    return SqlStoredResponses.of_gateway(limits, settings.responses_file)


def _any_codec(caches: Sequence[CacheSettings]) -> Codec:
    """The codec of the first recipe that names a key, for a server that no recipe names."""
    named = (cache for cache in caches if cache.encryption is not None)
    return load_codec_of(next(named, None))
