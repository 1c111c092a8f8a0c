"""The response cache in front of the deployment: what is kept, for how long, and where."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field

from pipeline.recipe.section import Section, refusal, require_tag

PASSWORD = "PIPELINE_CACHE_PASSWORD"  # environment variable, read where the cache is used


def _address(schemes: str, server: str, example: str) -> tuple[AfterValidator, Any]:
    """What an address of a server is checked by, for the loader and for the JSON schema."""
    pattern = rf"({schemes})://\S+"

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise refusal(f"is not the address of a {server} server", f"write {example}")
        if urlsplit(text).password is not None:
            raise refusal("holds a password", f"leave it out, and set {PASSWORD} where the cache is used")
        return text

    return AfterValidator(check), Field(json_schema_extra={"pattern": f"^{pattern}$"})


RedisUrl = Annotated[
    str,
    *_address(
        "rediss?|valkeys?",
        "Redis or Valkey",
        "redis://host:6379/0, or rediss:// for TLS; valkey:// is the same",
    ),
]
PostgresUrl = Annotated[
    str, *_address("postgresql|postgres", "PostgreSQL", "postgresql://user@host:5432/database")
]
QdrantUrl = Annotated[str, *_address("qdrants?", "Qdrant", "qdrant://host:6333, or qdrants:// for TLS")]


class SemanticLookup(Section):
    """Answers to questions that mean the same."""

    min_similarity: float = Field(
        ge=0.5, le=1, description="Cosine similarity of the embeddings that a hit needs."
    )


class SqliteBackend(Section):
    """One file, shared by the processes of one machine."""

    model_config = ConfigDict(json_schema_extra=require_tag)

    kind: Literal["sqlite"] = Field(default="sqlite", description="Which backend this is.")
    path: str | None = Field(default=None, min_length=1, description="The file; by default one in the store.")


class RedisBackend(Section):
    """A Redis or Valkey server, shared between machines. Its query engine, where it has one, finds what is near."""

    kind: Literal["redis"] = Field(description="Which backend this is.")
    url: RedisUrl = Field(description="Address of the server.", examples=["redis://host:6379/0"])


class PgvectorBackend(Section):
    """A PostgreSQL server with pgvector 0.8 or later, shared between machines."""

    kind: Literal["pgvector"] = Field(description="Which backend this is.")
    url: PostgresUrl = Field(
        description="Address of the database.", examples=["postgresql://user@host:5432/database"]
    )


class QdrantBackend(Section):
    """A Qdrant server, shared between machines. It cannot hold an encrypted cache."""

    kind: Literal["qdrant"] = Field(description="Which backend this is.")
    url: QdrantUrl = Field(description="Address of the server.", examples=["qdrant://host:6333"])


class ResponseCache(Section):
    """Exact lookup, and semantic lookup where `semantic` is given."""

    enabled: bool = Field(default=False, description="Answer repeated requests from the cache.")
    ttl_s: int = Field(default=600, ge=1, le=31_536_000, description="Age at which an answer is dropped.")
    max_entries: int = Field(default=100_000, ge=1, le=100_000_000, description="Answers that are kept.")
    max_mib: int = Field(default=1024, ge=1, le=1_048_576, description="Size of all answers together.")
    cache_sampled: bool = Field(
        default=False, description="Keep sampled answers too, not only greedy and seeded ones."
    )
    semantic: SemanticLookup | None = Field(default=None, description="Semantic lookup; off without it.")
    backend: Annotated[
        SqliteBackend | RedisBackend | PgvectorBackend | QdrantBackend, Field(discriminator="kind")
    ] = Field(default_factory=SqliteBackend, description="Where answers are kept.")
