"""The response cache: an exact key, then similarity of embeddings within the same scope.

Imports nothing of the side that builds models; embeddings, encryption, Redis and PostgreSQL are extras.
"""

from __future__ import annotations

from pipeline.cache.client import AsyncCachingClient, CachingClient
from pipeline.cache.key import Origin
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.setup import CacheSetupError, SentenceEncoder, open_cache

__all__ = [
    "AsyncCachingClient", "CacheSetupError", "CachingClient", "Origin", "ResponseCache", "SentenceEncoder",
    "open_cache",
]  # fmt: skip
