"""The response cache in front of the deployment: what is kept, for how long, and where."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from pipeline.recipe.section import Section, refusal, require_tag

_URL = re.compile(r"rediss?://\S+")


def _url(text: str) -> str:
    if not _URL.fullmatch(text):
        raise refusal(
            "is not the address of a Redis server", "write redis://host:6379/0, or rediss:// for TLS"
        )
    return text


Url = Annotated[str, AfterValidator(_url), Field(json_schema_extra={"pattern": f"^{_URL.pattern}$"})]


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
    """A Redis or Valkey server, shared between machines."""

    kind: Literal["redis"] = Field(description="Which backend this is.")
    url: Url = Field(description="Address of the server.", examples=["redis://host:6379/0"])


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
    backend: Annotated[SqliteBackend | RedisBackend, Field(discriminator="kind")] = Field(
        default_factory=SqliteBackend, description="Where answers are kept."
    )
