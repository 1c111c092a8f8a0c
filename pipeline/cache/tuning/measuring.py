"""Labelled pairs as a cache would judge them: how near they are, how they score, and what every guard finds.

`load_subject` loads what is tuned: embedder, verifiers and the dials that a recipe has, or would have by default.

Shares are told with Wilson's score interval (E. B. Wilson, 1927), which holds for few counts, too; what is promised
rests on the exact bound of Clopper and Pearson (1934).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.backend import Vector
from pipeline.cache.semantic.cross_encoder import CrossEncoder, CrossEncoderVerifier
from pipeline.cache.semantic.decision import Embed, Verifier, default_verifier
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.guards import GUARDS
from pipeline.cache.semantic.layer import is_shareable
from pipeline.cache.tuning.pairs import Pair
from pipeline.recipe.response_cache import SemanticSettings

Rows = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CountedShare:
    """A count out of a total, with its confidence interval.

    >>> share = CountedShare(0, 150)
    >>> f"{share.value:.3f} ({share.low():.3f} to {share.high():.3f}), at most {share.bound():.3f}"
    '0.000 (0.000 to 0.025), at most 0.020'
    """

    count: int
    of: int

    @property
    def value(self) -> float:
        """Share; 0 of nothing is 0."""
        return self.count / self.of if self.of else 0.0

    def low(self, confidence: float = 0.95) -> float:
        """Lower end of the two-sided interval."""
        return self._interval(confidence)[0]

    def high(self, confidence: float = 0.95) -> float:
        """Upper end of the two-sided interval; 1 if nothing was counted."""
        return self._interval(confidence)[1]

    def bound(self, confidence: float = 0.95) -> float:
        """Largest share with which so small a count is not less likely than 1 - confidence: exact, one-sided."""
        if self.count >= self.of:
            return 1.0
        low, high = self.value, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            if _at_most(self.count, self.of, middle) > 1 - confidence:
                low = middle
            else:
                high = middle
        return high

    def _interval(self, confidence: float) -> tuple[float, float]:
        if not self.of:
            return 0.0, 1.0
        z2 = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2
        middle = self.value + z2 / (2 * self.of)
        spread = math.sqrt(z2 * (self.value * (1 - self.value) + z2 / (4 * self.of)) / self.of)
        scale = 1 + z2 / self.of
        low, high = (middle - spread) / scale, (middle + spread) / scale
        return (0.0 if self.count == 0 else low), (1.0 if self.count == self.of else high)


def _at_most(count: int, of: int, share: float) -> float:
    """Probability of at most `count` out of `of`, each with probability `share` (above 0, below 1)."""
    k = np.arange(count + 1)
    log_choose = np.concatenate([[0.0], np.cumsum(np.log((of - k[1:] + 1) / k[1:]))])
    logs = log_choose + k * math.log(share) + (of - k) * math.log1p(-share)
    return float(np.exp(logs).sum())


def pairs_needed(budget: float, confidence: float = 0.95) -> int:
    """Return how many traps, none of them served, show that the budget is kept.

    >>> pairs_needed(0.01)
    299
    """
    return math.ceil(math.log(1 - confidence) / math.log(1 - budget))


# Question and candidate to the finding of each guard, by name; None or nothing for a guard that finds nothing.
Findings = Callable[[str, str], Mapping[str, str | None]]

# Floors of the cosine, and thresholds of the score, that are tried; of a cosine the last ones tell questions apart.
FLOORS = tuple(round(0.3 + step / 20, 2) for step in range(14))
SCORES = (
    *(round(step / 100, 2) for step in range(2, 80)),
    *(round(0.8 + step / 200, 3) for step in range(40)),
    0.999,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """The dials of semantic lookup, as a recipe has them.

    Attributes:
        verifier: verifier that scores, by its name in `PairMeasurements.scores`.
        min_similarity: cosine that every hit needs.
        min_score: score that every hit needs.
        guards: guards that may forbid one.
    """

    verifier: str
    min_similarity: float
    min_score: float
    guards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """Pairs that a cache would serve at one setting: of the true ones (`recall`) and of the traps (`false`)."""

    setting: Setting
    recall: CountedShare
    false: CountedShare


@dataclass(frozen=True, slots=True)
class PairMeasurements:
    """Cosine, scores and findings of every pair; rows are pairs.

    Attributes:
        cosines: float64 [pairs]; -1 where a text is too long for the embedder.
        scores: verifier -> float64 [pairs], as if no guard had found anything.
        forbidden: bool [pairs, guards], whether a guard found something.
        guards: their names.
    """

    pairs: Sequence[Pair]
    cosines: NDArray[np.float64]
    scores: Mapping[str, NDArray[np.float64]]
    forbidden: Rows
    guards: tuple[str, ...]

    @property
    def same(self) -> Rows:
        """The labels, bool [pairs]."""
        return np.array([pair.same for pair in self.pairs], np.bool_)

    def unforbidden(self, guards: Sequence[str]) -> Rows:
        """Pairs in which none of these guards found anything, bool [pairs]."""
        columns = [self.guards.index(name) for name in guards]
        allowed: Rows = ~self.forbidden[:, columns].any(axis=1)
        return allowed

    def passing(self, setting: Setting) -> Rows:
        """Pairs that a cache would serve, bool [pairs]."""
        passed: Rows = (
            self.unforbidden(setting.guards)
            & (self.cosines >= setting.min_similarity)
            & (self.scores[setting.verifier] >= setting.min_score)
        )
        return passed

    def outcome(self, setting: Setting, rows: Rows | None = None) -> PairOutcome:
        """Count what would be served, among some rows or all."""
        served, same = self.passing(setting), self.same
        among = np.ones(len(same), np.bool_) if rows is None else rows
        return PairOutcome(
            setting,
            recall=CountedShare(int((served & same & among).sum()), int((same & among).sum())),
            false=CountedShare(int((served & ~same & among).sum()), int((~same & among).sum())),
        )

    def served(self, setting: Setting, *, same: bool) -> list[Pair]:
        """Return the pairs of one label that would be served."""
        passed = self.passing(setting)
        return [pair for pair, yes in zip(self.pairs, passed, strict=True) if yes and pair.same is same]


def measure(
    pairs: Sequence[Pair],
    embed: Embed,
    verifiers: Mapping[str, Verifier],
    findings: Findings,
    guards: Sequence[str],
) -> PairMeasurements:
    """Embed, score and check every pair, one after another.

    Args:
        verifiers: by name; none of their guards may be on.
        findings: findings of all guards.
        guards: names of the guards that may be on.
    """
    cosines = np.empty(len(pairs))
    scores = {name: np.empty(len(pairs)) for name in verifiers}
    forbidden = np.zeros((len(pairs), len(guards)), np.bool_)
    for row, pair in enumerate(pairs):
        near = cosines[row] = cosine(embed(pair.a), embed(pair.b))
        by_guard = findings(pair.a, pair.b)
        forbidden[row] = [bool(by_guard.get(name)) for name in guards]
        for name, verifier in verifiers.items():
            scores[name][row] = verifier.decide(pair.a, pair.b, near).score
    return PairMeasurements(pairs, cosines, scores, forbidden, tuple(guards))


def cosine(first: Vector | None, second: Vector | None) -> float:
    """Return the cosine of two embeddings; -1 if one of the texts has none."""
    return -1.0 if first is None or second is None else float(first @ second)


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
        encoder: folder of the embedder.
        cross_encoder: folder of a verifier to be tried beside the cosine.
        verifier_name: source of the verifier, as a recipe names it.

    Raises:
        FileNotFoundError: a folder lacks a file.
        ValueError: the cross-encoder cannot be used.
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
