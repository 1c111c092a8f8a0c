"""The response cache in front of the deployment: what is kept, for how long, and where."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from pipeline.document_faults import refusal
from pipeline.recipe.sections import RecipeSection, matching, require_tag
from pipeline.recipe.source import HubSource, Revision, Source

PASSWORD = "PIPELINE_CACHE_PASSWORD"  # environment variable, read where the cache is used


def _address(schemes: str, server: str, example: str) -> tuple[AfterValidator, Any]:
    """Checks of a server's address, for the loader and for the JSON schema."""
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


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise refusal(
            f"is not a regular expression: {error}", r'write one, such as "\\b(today|now)\\b"'
        ) from None
    return text


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_pattern)]
Kind = Literal["key", "e-mail", "card", "iban", "national_id", "phone"]  # see pipeline.cache.redaction


Region = Annotated[
    str,
    *matching(
        "[A-Z]{2}", "write two capital letters of ISO 3166, such as GB", "is not the code of a country"
    ),
]
# See pipeline.cache.semantic.guards.
GuardName = Literal["numbers", "names", "negation", "accents"]
# See pipeline.cache.semantic.layer.
Language = Literal["en", "de", "fr", "es", "any"]


def _not_empty(languages: tuple[str, ...]) -> tuple[str, ...]:
    if not languages:
        raise refusal("is empty", "name at least one, or leave the key out")
    return languages


class SemanticSettings(RecipeSection):
    """Answers to questions that mean the same: near ones that no guard forbids, and whose score is high enough."""

    min_similarity: float = Field(
        default=0.8, ge=0.3, le=1, description="Cosine similarity of the embeddings that a hit needs."
    )
    min_score: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Score that a hit needs: the cosine, or the probability that a `verifier` gives. More serves less. "
        "By default 0.94 with all-MiniLM-L6-v2; with another encoder only the same words pass without it. "
        "`pipeline cache tune` chooses it by labelled pairs.",
        examples=[0.95],
    )
    guards: tuple[GuardName, ...] | None = Field(
        default=None,
        description="Guards that forbid a hit whatever the score: other numbers and codes, other names, negation, and "
        "words that differ by accents, which the encoder does not see. By default all; [] is none. "
        "`pipeline cache tune` says which may be left out.",
        examples=[["numbers", "names", "accents"]],
        strict=False,
    )
    languages: Annotated[tuple[Language, ...], AfterValidator(_not_empty)] = Field(
        default=("en", "de", "fr", "es"),
        description="Questions with letters of other languages are answered by the exact cache alone. The four are "
        "those in which all-MiniLM-L6-v2 was measured; `any` is for another encoder that you have measured.",
        examples=[["en"], ["any"]],
        strict=False,
    )
    tenants: tuple[str, ...] | None = Field(
        default=None,
        description="Tenants whose near questions share answers, each among its own; by default all. Leave out those "
        "whose answers depend on more than the request.",
        examples=[["help-desk", "faq"]],
        strict=False,
    )
    embedder: Source = Field(
        default=HubSource("sentence-transformers/all-MiniLM-L6-v2"),
        description="Sentence encoder (BERT): a checkpoint, or a local folder with tokenizer.json and model.onnx.",
        examples=["hf:sentence-transformers/all-MiniLM-L6-v2", "local:encoders/all-MiniLM-L6-v2"],
    )
    embedder_revision: Revision | None = Field(
        default=None, description="Branch, tag or commit on the Hub; without it, the default branch."
    )
    verifier: Source | None = Field(
        default=None,
        description="Cross-encoder for duplicate questions, which decides instead of the cosine and takes some 4 ms of "
        "a core for each near question, if it is small (6 layers of 384): a repository with a published ONNX graph, a "
        "BERT checkpoint, or a local folder with tokenizer.json and model.onnx. The guards stay on.",
        examples=["hf:cross-encoder/quora-distilroberta-base"],
    )
    verifier_revision: Revision | None = Field(
        default=None, description="Branch, tag or commit on the Hub; without it, the default branch."
    )
    mode: Literal["serve", "shadow"] = Field(
        default="shadow",
        description="With shadow, near hits are counted (`shadow_semantic`) and kept for review; the model answers. "
        "`pipeline cache tune` says by labelled pairs whether they may be served.",
    )
    review: bool = Field(
        default=True,
        description="Keep which questions were answered with whose answers, for as long as answers are kept, so that "
        "`pipeline cache review` can show them to a person.",
    )


class RedactionPattern(RecipeSection):
    """Something that must not be kept."""

    name: str = Field(min_length=1, description="Name in counters and audits.", examples=["customer"])
    pattern: Pattern = Field(description="Regular expression.", examples=[r"\bC-\d{8}\b"])


class RedactionSettings(RecipeSection):
    """Rules that keep an answer from being stored; nothing is blacked out."""

    kinds: tuple[Kind, ...] = Field(
        default=("key", "e-mail", "card", "iban", "national_id", "phone"),
        description="Kinds to look for: keys, tokens and passwords; e-mail addresses; payment cards; bank accounts; "
        "national ids; telephone numbers.",
        strict=False,
    )
    phone_regions: tuple[Region, ...] | None = Field(
        default=None,
        description="ISO 3166 codes of the countries whose telephone numbers are known in national form; those that "
        "begin with + always are. By default twenty countries, see pipeline.cache.redaction; [] for none.",
        examples=[["GB", "IE"]],
        strict=False,
    )
    patterns: tuple[RedactionPattern, ...] = Field(default=(), description="Further patterns.", strict=False)


class EncryptionSettings(RecipeSection):
    """Encryption at rest (AES-256-GCM). The key is 32 bytes in base64; without one, the cache is not opened."""

    key_env: str | None = Field(
        default=None, min_length=1, description="Environment variable with the key.", examples=["CACHE_KEY"]
    )
    key_file: str | None = Field(
        default=None, min_length=1, description="File with the key.", examples=["/run/secrets/cache.key"]
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.key_env is None) == (self.key_file is None):
            raise refusal("needs one place of the key", "give key_env or key_file, not both")
        return self


class SqliteSettings(RecipeSection):
    """One file, shared by the processes of one machine."""

    model_config = ConfigDict(json_schema_extra=require_tag)

    kind: Literal["sqlite"] = Field(default="sqlite", description="Which backend this is.")
    path: str | None = Field(default=None, min_length=1, description="The file; by default one in the store.")


class RedisSettings(RecipeSection):
    """A Redis or Valkey server, shared between machines. Its query engine, where it has one, finds what is near.

    Gateways keep stored responses there, too, whether or not the cache is enabled.
    """

    kind: Literal["redis"] = Field(description="Which backend this is.")
    url: RedisUrl = Field(description="Address of the server.", examples=["redis://host:6379/0"])


class PgvectorSettings(RecipeSection):
    """A PostgreSQL server with pgvector 0.8 or later, shared between machines.

    Gateways keep files, batches and stored responses there, too, whether or not the cache is enabled.
    """

    kind: Literal["pgvector"] = Field(description="Which backend this is.")
    url: PostgresUrl = Field(
        description="Address of the database.", examples=["postgresql://user@host:5432/database"]
    )


class CacheSettings(RecipeSection):
    """Exact lookup, and semantic lookup where `semantic` is given."""

    enabled: bool = Field(default=False, description="Answer repeated requests from the cache.")
    ttl_s: int = Field(
        default=86_400,
        ge=1,
        le=31_536_000,
        description="Age at which an answer is dropped, however often it was served. A request may ask for less.",
    )
    max_entries: int = Field(default=100_000, ge=1, le=100_000_000, description="Answers that are kept.")
    max_mib: int = Field(default=1024, ge=1, le=1_048_576, description="Size of all answers together.")
    cache_sampled: bool = Field(
        default=False, description="Keep sampled answers too, not only greedy and seeded ones."
    )
    replay_pace: float = Field(
        default=0,
        ge=0,
        le=10,
        description="Pace of a replayed answer: 0 is at once, 1 the original pace.",
    )
    redaction: RedactionSettings = Field(
        default_factory=RedactionSettings, description="Answers that are never kept."
    )
    encryption: EncryptionSettings | None = Field(
        default=None, description="Encryption at rest; by default, if PIPELINE_CACHE_KEY is set."
    )
    semantic: SemanticSettings | None = Field(default=None, description="Semantic lookup; off without it.")
    backend: Annotated[SqliteSettings | RedisSettings | PgvectorSettings, Field(discriminator="kind")] = (
        Field(default_factory=SqliteSettings, description="Where answers are kept.")
    )
