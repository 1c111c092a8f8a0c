"""From plain settings to a cache that is ready: what a recipe's `cache` section says, or an application.

    cache = open_cache(CacheSettings("answers.db", lifetime=Lifetime(static_s=3600)))
    client = CachingClient(Client(url), cache, Origin("my-deployment"))

Semantic lookup needs the distributions onnxruntime and tokenizers, sealing cryptography, and redaction phonenumbers and
python-stdnum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pipeline.cache.backend import Backend, BackendDown, Capacity
from pipeline.cache.backends import open_backend
from pipeline.cache.encryption import Secret, codec_of
from pipeline.cache.lifetime import Lifetime
from pipeline.cache.redaction import PHONE_REGIONS, Redaction
from pipeline.cache.response_cache import ResponseCache, Semantic
from pipeline.cache.semantic.layer import SemanticLayer, Verifier
from pipeline.extras import install_line

Part = TypeVar("Part")


class CacheSetupError(ValueError):
    """The cache cannot be had as it is asked for; the text tells everything that is wrong, a line each."""


@dataclass(frozen=True, slots=True)
class SemanticSettings:
    """Answers to questions that mean the same."""

    embedder: Path  # folder: tokenizer.json and model_int8.onnx or model.onnx
    min_similarity: float = 0.45  # cosine
    name: str | None = None  # of the embedder's model, by default that of the folder
    checks: Sequence[str] | None = None  # of pipeline.cache.semantic.verification.CHECKS; None: all
    scorer: bool | None = None  # the learned one decides; None: where it knows the embedder
    min_score: float = 0.0  # of the scorer, that a hit needs: log odds; more serves less


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What is kept, for how long, and where."""

    place: str | Path  # a file, or an address as `open_backend` takes it
    name: str = "pipeline"  # whose cache it is, of several on one server
    capacity: Capacity = field(default_factory=Capacity)
    lifetime: Lifetime = field(default_factory=Lifetime)
    keep_sampled: bool = False  # answers of which each request draws another, too
    pace: float = 0.0  # of replays; 0 is at once, 1 as the answer once came
    redact: Sequence[str] | None = None  # kinds that are not kept (see `redaction.KINDS`); None: all
    redact_patterns: Mapping[str, str] = field(
        default_factory=dict
    )  # more of them: name -> regular expression
    phone_regions: Sequence[str] | None = None  # whose national telephone numbers are known; None: by default
    secret: Secret = field(default_factory=Secret)
    semantic: SemanticSettings | None = None

    def redaction(self) -> Redaction:
        """What keeps an answer from being stored. Raises ValueError and ImportError as `Redaction` does."""
        regions = PHONE_REGIONS if self.phone_regions is None else self.phone_regions
        return Redaction(self.redact, self.redact_patterns, regions)

    def backend(self) -> Backend:
        """Where answers are kept.

        Raises:
            BackendDown: the file cannot be used. ValueError: the address or the key is none.
        """
        return open_backend(self.place, self.capacity, name=self.name, codec=codec_of(secret=self.secret))


def open_cache(settings: CacheSettings, *, verifier: Verifier | None = None) -> ResponseCache:
    """A cache that is ready. A server that is down is no fault: it makes misses, and may come back.

    Args:
        verifier: judges near questions instead of our own checks.

    Raises:
        CacheSetupError: with all that is wrong.
    """
    faults: list[str] = []
    keeper = _part(settings.redaction, "redaction", faults)
    backend = _part(settings.backend, "backend", faults)
    layer = None
    if settings.semantic is not None and backend is not None:
        wanted, below = settings.semantic, backend
        layer = _part(lambda: _semantic(wanted, below, verifier), "semantic", faults)
    if settings.pace < 0:
        faults.append(f"replay pace {settings.pace:g}: must be at least 0")
    if faults or backend is None:
        if backend is not None:
            backend.close()
        raise CacheSetupError("\n".join(faults))
    return ResponseCache(
        backend,
        lifetime=settings.lifetime,
        keep_sampled=settings.keep_sampled,
        pace=settings.pace,
        semantic=layer,
        keeper=keeper,
    )


def _semantic(settings: SemanticSettings, backend: Backend, verifier: Verifier | None) -> Semantic:
    if not 0 < settings.min_similarity <= 1:
        raise ValueError(f"min_similarity {settings.min_similarity:g}: must be above 0 and at most 1")
    from pipeline.cache.semantic.embedder import Embedder
    from pipeline.cache.semantic.scoring import verifier_for

    embedder = Embedder(settings.embedder, name=settings.name)
    if verifier is None:
        verifier = verifier_for(
            embedder, settings.checks, scorer=settings.scorer, min_score=settings.min_score
        )
    return SemanticLayer(backend, embedder, verifier, settings.min_similarity)


def _part(make: Callable[[], Part], what: str, faults: list[str]) -> Part | None:
    try:
        return make()
    except ImportError as error:
        extra = "" if (error.name or "").startswith("pipeline.") else f": {install_line('cache')}"
        faults.append(f"{what}: {error}{extra}")
    except (BackendDown, ValueError, OSError) as error:
        faults.append(f"{what}: {error}")
    return None
