"""The embedded backend: one SQLite file in WAL mode, shared by the processes of one machine, safe from `kill -9`."""

from __future__ import annotations

from pipeline.cache.sqlite.backend import SqliteBackend

__all__ = ["SqliteBackend"]
