"""Where a gateway keeps files, batches and stored responses: with what the deployment has already.

| the deployment has | files and batches | stored responses |
| --- | --- | --- |
| PostgreSQL: a recipe with `cache.backend` of kind pgvector | there | there |
| Redis or Valkey: `limits_redis`, by which several gateways share limits | refused | there |
| Redis or Valkey: a recipe with `cache.backend` of kind redis | a folder | there |
| neither: the gateway serves alone | a folder | its memory |

A folder that is named (`batch_folder`) is taken in any case. Files and batches are not put into Redis: it may forget.
What a server is given is encrypted as the response cache of the recipe is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.cache.redis_server import RedisAddress
from pipeline.cache.setup import load_codec_of
from pipeline.gateway.api.batches.places import (
    BATCH_TABLES,
    CONTENT_TABLES,
    BatchFolder,
    PostgresBatches,
)
from pipeline.gateway.api.batches.storage import BatchStorage, StorageLimits
from pipeline.gateway.api.responses.redis import RedisStoredResponses
from pipeline.gateway.api.responses.stored import (
    RESPONSE_TABLES,
    NoStoredResponses,
    SqlStoredResponses,
    StoredResponseLimits,
    StoredResponses,
)
from pipeline.gateway.database import StateDatabase
from pipeline.gateway.settings import GatewaySettings
from pipeline.recipe import CacheSettings


def open_state(
    caches: Sequence[CacheSettings],
    settings: GatewaySettings,
    *,
    own_folder: Path,
    responses_file: Path | None = None,
) -> tuple[BatchStorage | None, StoredResponses]:
    """Choose where state is kept. No server is contacted yet.

    Args:
        caches: `cache` sections of the recipes that are served; servers that they name are used whether or not answers
            are cached there.
        own_folder: folder of files and batches of a gateway that serves alone.
        responses_file: database that the workers of a gateway share, where stored responses are on no server; None for
            the memory of this process.

    Returns:
        Storage of files and batches, None where they are refused; stored responses.

    Raises:
        ValueError: a key is missing or malformed, or a distribution is missing.
    """
    limits = StorageLimits(
        file_bytes=settings.max_file_mib * 2**20, tenant_bytes=settings.max_stored_mib * 2**20
    )
    response_limits = StoredResponseLimits(
        settings.stored_responses, settings.stored_responses_mib * 2**20, settings.stored_responses_s
    )
    url, database = settings.limits_redis, _postgres(caches)
    redis = None if url is None else RedisAddress.parse(url)
    batches: BatchStorage | None = None
    if settings.batch_folder is not None:
        if settings.batch_folder.is_file():
            raise ValueError(f"gateway.batch_folder: {settings.batch_folder} is a file; name a folder")
        batches = BatchStorage(BatchFolder(settings.batch_folder), limits)
    elif database is not None:
        batches = BatchStorage(database, limits)
    elif redis is None:
        batches = BatchStorage(BatchFolder(own_folder), limits)
    return batches, _responses(caches, response_limits, database, redis, responses_file)


def _postgres(caches: Sequence[CacheSettings]) -> PostgresBatches | None:
    for cache in caches:
        if cache.backend.kind == "pgvector":
            tables = BATCH_TABLES + CONTENT_TABLES + RESPONSE_TABLES
            return PostgresBatches(cache.backend.url, load_codec_of(cache), tables)
    return None


def _responses(
    caches: Sequence[CacheSettings],
    limits: StoredResponseLimits,
    database: StateDatabase | None,
    redis: RedisAddress | None,
    file: Path | None,
) -> StoredResponses:
    if not limits.count:
        return NoStoredResponses()
    if database is not None:
        return SqlStoredResponses(database, limits)
    for cache in caches:
        if cache.backend.kind == "redis":
            return RedisStoredResponses(RedisAddress.parse(cache.backend.url), load_codec_of(cache), limits)
    if redis is not None:
        # No recipe names this server: the key is that of the first recipe that has one.
        encrypted = next((cache for cache in caches if cache.encryption is not None), None)
        return RedisStoredResponses(redis, load_codec_of(encrypted), limits)
    return SqlStoredResponses.of_gateway(limits, file)
