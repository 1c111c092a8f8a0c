"""The subject of tuning: embedder, verifiers and the dials that a recipe has, or would have by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.cache.semantic.cross_encoder import CrossEncoder, CrossEncoderVerifier
from pipeline.cache.semantic.decision import Embed, Verifier, default_verifier
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.guards import GUARDS
from pipeline.cache.semantic.layer import is_shareable
from pipeline.cache.tuning.measuring import Setting
from pipeline.recipe.response_cache import SemanticSettings

# Name of the cosine; a cross-encoder is named by its source.
BUILT_IN = "built-in"


@dataclass(frozen=True, slots=True)
class TuningSubject:
    """Semantic lookup that is tuned.

    Attributes:
        embed: text to embedding; None also for a text that is not shared by meaning.
        verifier: as the recipe has it.
        scorers: verifiers without guards, by name, as `measure` takes them.
        setting: dials of the recipe.
        default: dials of a recipe that leaves them out.
    """

    embed: Embed
    verifier: Verifier
    scorers: Mapping[str, Verifier]
    setting: Setting
    default: Setting


def load_subject(
    settings: SemanticSettings, encoder: Path, cross_encoder: Path | None, verifier_name: str
) -> TuningSubject:
    """Load the models of a subject.

    Args:
        settings: `cache.semantic` of the recipe.
        encoder: folder of the embedder.
        cross_encoder: folder of a verifier to be tried beside the cosine.
        verifier_name: source of the verifier, as a recipe names it.

    Raises:
        FileNotFoundError: a folder lacks a file.
        ValueError: the cross-encoder is none.
        ImportError: a distribution is missing.
    """
    embedder = Embedder(encoder)
    guards = tuple(GUARDS) if settings.guards is None else tuple(settings.guards)
    verifier: Verifier = default_verifier(embedder, guards)
    scorers: dict[str, Verifier] = {BUILT_IN: default_verifier(embedder, ())}
    name = BUILT_IN
    if cross_encoder is not None:
        model = CrossEncoder(cross_encoder)
        # A folder that holds something else is refused here, and not after a minute.
        model("Where is my parcel?", "When does my parcel come?")
        name, verifier = verifier_name, CrossEncoderVerifier(verifier, model)
        scorers[name] = CrossEncoderVerifier(scorers[BUILT_IN], model)
    return TuningSubject(
        embed=lambda text: embedder(text) if is_shareable(text, settings.languages) else None,
        verifier=verifier,
        scorers=scorers,
        setting=Setting(
            name,
            settings.min_similarity,
            verifier.default_min_score if settings.min_score is None else settings.min_score,
            guards,
        ),
        default=Setting(
            BUILT_IN,
            SemanticSettings().min_similarity,
            scorers[BUILT_IN].default_min_score,
            tuple(GUARDS),
        ),
    )
