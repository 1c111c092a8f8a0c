"""Answers in Qdrant, where one runs already. It must read the embeddings, so that no encrypted cache can lie in it."""

from __future__ import annotations

from pipeline.cache.qdrant.backend import QdrantBackend

__all__ = ["QdrantBackend"]
