"""A learned scorer of near questions: how likely one answer serves both, from their words as the embedder sees them."""

from pipeline.cache.semantic.scoring.judge import Learned, verifier_for
from pipeline.cache.semantic.scoring.scorer import Scorer, load_scorer

__all__ = ["Learned", "Scorer", "load_scorer", "verifier_for"]
