"""Nearest neighbours among unit vectors, in memory: derived from a database, never saved."""

from __future__ import annotations

from pipeline.cache.vectors.index import VectorIndex

__all__ = ["VectorIndex"]
