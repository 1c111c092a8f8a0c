"""Answers in PostgreSQL with the extension pgvector (0.8 or later): shared, durable, and searched by an HNSW index."""

from __future__ import annotations

from pipeline.cache.pgvector.backend import PgvectorBackend

__all__ = ["PgvectorBackend"]
