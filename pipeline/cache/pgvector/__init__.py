"""Answers in PostgreSQL with the extension pgvector (0.8 or later): shared, durable, and searched by an HNSW index.

What it needs is made at the first use: the extension, and a schema with tables and functions. The role therefore owns
the database; or somebody ran `CREATE EXTENSION vector` there and granted it CREATE.
"""

from __future__ import annotations

from pipeline.cache.pgvector.backend import PgvectorBackend

__all__ = ["PgvectorBackend"]
