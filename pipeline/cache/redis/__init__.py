"""Answers in a Redis or Valkey server, shared by the processes of any number of machines.

Redis since 7.4 comes under RSALv2, SSPLv1 or (since 8.0) AGPLv3; Valkey and Redis up to 7.2 under BSD. The exact layer
works with all of them from 6.2 on.
"""

from __future__ import annotations

from pipeline.cache.redis.backend import RedisBackend
from pipeline.cache.redis.server import RedisAddress

__all__ = ["RedisAddress", "RedisBackend"]
