"""From settings to a cache that is ready. The settings are the `cache` section of a recipe, for applications too:

    settings = CacheSettings(ttl_s=3600)                    # pipeline.recipe
    cache = open_cache(settings, "answers.db")
    client = CachingClient(Client(url), cache, Origin("my-deployment"))

Semantic lookup needs the distributions faiss-cpu, onnxruntime and tokenizers; encryption cryptography; and redaction
phonenumbers and python-stdnum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeline.cache.backend import Backend, BackendDown, Capacity
from pipeline.cache.backends import open_backend
from pipeline.cache.encryption import Codec, KeySource, load_codec
from pipeline.cache.key import tenant_id
from pipeline.cache.near_hits import NEAR_HITS, NearHitLog, near_hits_place
from pipeline.cache.redaction import PHONE_REGIONS, Redaction
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.semantic.layer import SemanticLayer
from pipeline.extras import install_line

if TYPE_CHECKING:
    from pipeline.cache.semantic.decision import Verifier
    from pipeline.cache.semantic.embedder import Embedder
    from pipeline.recipe import CacheSettings, HubSource, LocalSource
    from pipeline.recipe.response_cache import SemanticSettings

_Part = TypeVar("_Part")


class CacheSetupError(ValueError):
    """The cache cannot be opened as its settings ask; the text names everything that is wrong, a line each."""


@dataclass(frozen=True, slots=True)
class SentenceEncoder:
    """A sentence encoder that can be loaded: a folder with tokenizer.json and model_int8.onnx or model.onnx."""

    folder: Path
    # Such as all-MiniLM-L6-v2; by default that of the folder.
    name: str | None = None


def open_cache(
    settings: CacheSettings,
    place: str | Path | None = None,
    *,
    name: str = "pipeline",
    encoder: SentenceEncoder | None = None,
    verifier: Verifier | None = None,
    cross_encoder: Path | None = None,
) -> ResponseCache:
    """Open a cache, whether the settings enable it or not.

    A server that is down is no error: it makes misses, and may come back.

    Args:
        settings: a recipe's `cache` section.
        place: where answers are kept instead of `settings.backend`: a file, or an address as `open_backend` takes it.
        name: distinguishes several caches on one server.
        encoder: for semantic lookup; by default the local folder that the settings name.
        verifier: judges near questions instead of the one that the settings name.
        cross_encoder: folder of the cross-encoder; by default the local folder that the settings name.

    Raises:
        CacheSetupError: something is wrong or missing; the text names all of it.
    """
    errors: list[str] = []
    redaction = _part(lambda: make_redaction(settings), "redaction", errors)
    backend = _part(lambda: make_backend(settings, place, name=name), "backend", errors)
    semantic, near_hits = None, None
    if settings.semantic is not None and backend is not None:
        below = backend
        semantic = _part(
            lambda: _semantic(settings, below, encoder, verifier, cross_encoder), "semantic", errors
        )
        if settings.semantic.review:
            near_hits = _part(lambda: make_near_hits(settings, place, name=name), "near hits", errors)
    if errors or backend is None:
        if backend is not None:
            backend.close()
        if near_hits is not None:
            near_hits.close()
        raise CacheSetupError("\n".join(errors))
    return ResponseCache(
        backend,
        ttl_s=settings.ttl_s,
        keep_sampled=settings.cache_sampled,
        pace=settings.replay_pace,
        semantic=semantic,
        shadow=settings.semantic is not None and settings.semantic.mode == "shadow",
        near_hits=near_hits,
        redactor=redaction,
    )


def make_near_hits(settings: CacheSettings, place: str | Path | None = None, *, name: str) -> NearHitLog:
    """Open the near hits that are kept beside the answers of a cache; arguments are those of `make_backend`."""
    where, named = near_hits_place(_place(settings, place), name)
    backend = open_backend(where, NEAR_HITS, name=named, codec=load_codec_of(settings))
    return NearHitLog(backend, settings.ttl_s)


def make_backend(settings: CacheSettings, place: str | Path | None = None, *, name: str) -> Backend:
    """Open the backend of a cache, with its capacity and its encryption.

    Args:
        settings: a recipe's `cache` section.
        place: a file or an address, instead of `settings.backend`.
        name: distinguishes several caches on one server.

    Raises:
        BackendDown: the file cannot be used.
        ValueError: the address or the key is malformed, or no file is named.
    """
    capacity = Capacity(settings.max_entries, settings.max_mib * 2**20)
    return open_backend(_place(settings, place), capacity, name=name, codec=load_codec_of(settings))


def _place(settings: CacheSettings, place: str | Path | None) -> str | Path:
    if place is not None:
        return place
    if settings.backend.kind != "sqlite":
        return settings.backend.url
    if settings.backend.path is None:
        raise ValueError("no file is named: give backend.path, or a place")
    return Path(settings.backend.path)


def load_codec_of(settings: CacheSettings | None) -> Codec:
    """Return the codec that a recipe's `cache` section asks for; None: by the environment alone.

    Raises:
        ValueError: the key is missing or malformed.
    """
    encryption = None if settings is None else settings.encryption
    secret = KeySource()
    if encryption is not None and encryption.key_file is not None:
        secret = KeySource(file=Path(encryption.key_file), required=True)
    elif encryption is not None:
        secret = KeySource(variable=encryption.key_env or "", required=True)
    return load_codec(secret)


def make_redaction(settings: CacheSettings) -> Redaction:
    """Make the redaction of a recipe's `cache` section.

    Raises:
        ImportError: a distribution that a kind needs is missing.
        ValueError: a region is unknown.
    """
    redaction = settings.redaction
    regions = PHONE_REGIONS if redaction.phone_regions is None else redaction.phone_regions
    return Redaction(redaction.kinds, {own.name: own.pattern for own in redaction.patterns}, regions)


def _semantic(
    settings: CacheSettings,
    backend: Backend,
    encoder: SentenceEncoder | None,
    verifier: Verifier | None,
    cross_encoder: Path | None,
) -> SemanticLayer:
    from pipeline.cache.semantic.embedder import Embedder

    semantic = settings.semantic
    assert semantic is not None, "called only where semantic lookup is on"
    if encoder is None:
        encoder = SentenceEncoder(_local(semantic.embedder, "encoder"))
    embedder = Embedder(encoder.folder, name=encoder.name)
    if verifier is None:
        verifier = _verifier(semantic, embedder, cross_encoder)
    return SemanticLayer(
        backend,
        embedder,
        verifier,
        semantic.min_similarity,
        semantic.min_score,
        languages=semantic.languages,
        tenants=None if semantic.tenants is None else frozenset(map(tenant_id, semantic.tenants)),
    )


def _verifier(semantic: SemanticSettings, embedder: Embedder, cross_encoder: Path | None) -> Verifier:
    """Make the verifier: guards that are on, and the score of the cross-encoder that is named, or the cosine."""
    from pipeline.cache.semantic.cross_encoder import CrossEncoder, CrossEncoderVerifier
    from pipeline.cache.semantic.decision import default_verifier

    guarded = default_verifier(embedder, semantic.guards)
    if semantic.verifier is None:
        return guarded
    return CrossEncoderVerifier(
        guarded, CrossEncoder(cross_encoder or _local(semantic.verifier, "cross-encoder"))
    )


def _local(source: HubSource | LocalSource, kind: str) -> Path:
    from pipeline.recipe import LocalSource

    if not isinstance(source, LocalSource):
        raise ValueError(f"{source} is not a local folder: give the {kind} that was made of it")
    return source.path


def _part(make: Callable[[], _Part], name: str, errors: list[str]) -> _Part | None:
    try:
        return make()
    except ImportError as error:
        extra = "" if (error.name or "").startswith("pipeline.") else f": {install_line('cache')}"
        errors.append(f"{name}: {error}{extra}")
    except (BackendDown, ValueError, OSError) as error:
        errors.append(f"{name}: {error}")
    return None
