"""Whether a cache that learns its thresholds from the answers keeps a budget of wrong hits, and at what cost in hits.

    python benchmarks/learned_thresholds.py ENCODER --pairs FILE [--seeds N]

ENCODER is a folder as `export_encoder` makes it of all-MiniLM-L6-v2; FILE holds labelled pairs, as
`pipeline cache tune` reads them. Two replays are made of them:

pairs      one question of each pair is stored, and the other is asked of it
stream     all questions are asked in a random order of one cache that is empty at first; the nearest stored question is
           the candidate, and its answer is right if labels join the two, directly or over other questions. What nobody
           labelled counts as wrong

A policy serves the candidate's answer, or generates, which shows whether the two answers are the same: here the
labels say so without error, which no comparison of two texts does. Of each policy are told hits, wrong hits among all
requests (which is what vCache's budget is about) and among the hits; beside it, the hits of the single threshold that
does best on the same replay with no more wrong hits, chosen when all is known.

per question     vCache (L. Schroeder and others, ICLR 2026, arXiv:2502.03771): each stored question has a curve
                 of its own over the similarity, from six observations on. With alpha the lower bound of the probability
                 that the answer is right, it serves with probability budget / (1 - alpha), at most 1
all together     the same with one curve for all stored questions
threshold        the lowest score whose wrong hits among all requests are within the budget by an exact bound (95 %) on
                 what was seen; one in twenty hits is generated all the same, to go on learning

"neighbours" is no policy: each pair is ranked by its score and by what happened to the stored questions near its own
(residuals of all pairs before it, weighted by similarity), as if every label were seen. What learning from neighbours
could bring at best, it shows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.semantic.decision import Verifier, default_verifier
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.tuning.measuring import CountedShare
from pipeline.cache.tuning.pairs import Pair, read_pairs

Floats = NDArray[np.float64]
BUDGETS = (0.01, 0.02, 0.05)
FLOOR = 0.45  # cosine of a candidate
_LEAST = 6  # observations of a question before its curve is believed
_NEAREST = 50  # neighbours among which the nearest that is stored is looked for
_WIDTH = 0.15  # of the kernel over 1 - cosine of two stored questions
_PRIOR = 5.0  # observations that a question's neighbours have to outweigh
_EXPLORED = 0.05
_EPSILONS = np.linspace(1e-3, 0.5, 25)
_QUANTILES = np.array([NormalDist().inv_cdf(1 - epsilon) for epsilon in _EPSILONS])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request with the stored question that is nearest to it."""

    stored: int
    score: float
    right: bool


class Policy(Protocol):
    def serves(self, candidate: Candidate) -> bool: ...
    def learn(self, candidate: Candidate) -> None: ...


@dataclass(slots=True)
class SingleThreshold:
    """Defaults of recipes."""

    least: float

    def serves(self, candidate: Candidate) -> bool:
        return candidate.score >= self.least

    def learn(self, candidate: Candidate) -> None:
        pass


@dataclass(slots=True)
class LogisticCurves:
    """vCache's rule, with a curve for each question, or one for all."""

    budget: float
    together: bool
    random: np.random.Generator
    _seen: dict[int, list[tuple[float, bool]]] = field(default_factory=dict)
    _fitted: dict[int, tuple[int, tuple[float, float, float]]] = field(default_factory=dict)

    def serves(self, candidate: Candidate) -> bool:
        key = 0 if self.together else candidate.stored
        seen = self._seen.get(key, [])
        if len(seen) < _LEAST:
            return False
        count, fitted = self._fitted.get(key, (0, (0.0, 0.0, 0.0)))
        # One that has many is fitted again when it has a twentieth more.
        if len(seen) > 1.05 * count:
            fitted = fit_logistic(seen)
            self._fitted[key] = (len(seen), fitted)
        threshold, slope, deviation = fitted
        above = slope * (candidate.score - (threshold + _QUANTILES * deviation))
        alpha = float(np.max((1 - _EPSILONS) / (1 + np.exp(-np.clip(above, -60, 60)))))
        return bool(self.random.random() < self.budget / (1 - alpha))

    def learn(self, candidate: Candidate) -> None:
        key = 0 if self.together else candidate.stored
        self._seen.setdefault(key, []).append((candidate.score, candidate.right))


def fit_logistic(seen: Sequence[tuple[float, bool]]) -> tuple[float, float, float]:
    """Threshold, slope, and the standard deviation of the threshold (delta method); a weak prior keeps them finite."""
    rows = np.array([(1.0, score) for score, _ in seen])
    labels = np.array([right for _, right in seen], float)
    prior = np.diag([1e-2, 1e-2])
    weights = np.zeros(2)
    for _ in range(30):
        odds = 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))
        hessian = (rows * (odds * (1 - odds))[:, None]).T @ rows + prior
        step = np.linalg.solve(hessian, rows.T @ (labels - odds) - prior @ weights)
        weights += step
        if np.abs(step).max() < 1e-6:
            break
    slope = max(weights[1], 1e-3)
    gradient = np.array([-1 / slope, weights[0] / slope**2])
    return -weights[0] / slope, slope, math.sqrt(float(gradient @ np.linalg.inv(hessian) @ gradient))


@dataclass(slots=True)
class LearnedThreshold:
    """The lowest threshold that what was seen shows to keep the budget; of the hits above it some are looked at."""

    budget: float
    random: np.random.Generator
    _scores: list[float] = field(default_factory=list)
    _wrong: list[bool] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)  # how many requests each stands for
    _least: float = math.inf
    _next: int = 100

    def serves(self, candidate: Candidate) -> bool:
        return candidate.score >= self._least and self.random.random() >= _EXPLORED

    def learn(self, candidate: Candidate) -> None:
        self._scores.append(candidate.score)
        self._wrong.append(not candidate.right)
        self._weights.append(1 / _EXPLORED if candidate.score >= self._least else 1.0)
        if len(self._scores) >= self._next:
            self._next = math.ceil(1.1 * self._next)
            self._choose()

    def _choose(self) -> None:
        """Wrong hits among requests are the share above a threshold, times the bound on how many of them are wrong."""
        order = np.argsort(self._scores)[::-1]
        scores, weights = np.array(self._scores)[order], np.array(self._weights)[order]
        wrong = np.cumsum(np.array(self._wrong)[order])
        above = np.cumsum(weights) / weights.sum()
        self._least = math.inf
        for count in range(20, len(scores), max(1, len(scores) // 100)):
            bound = CountedShare(int(wrong[count - 1]), count).bound(0.95)
            if above[count - 1] * bound > self.budget:
                break
            self._least = float(scores[count - 1])


@dataclass(slots=True)
class Tally:
    """Outcomes of the requests of a replay."""

    requests: int = 0
    hits: int = 0
    wrong: int = 0

    def count(self, served: bool, right: bool) -> None:
        self.requests += 1
        self.hits += served
        self.wrong += served and not right

    @property
    def error(self) -> float:
        return self.wrong / self.requests


class Replay(Protocol):
    name: str

    def run(self, policy: Policy, seed: int) -> Tally: ...


@dataclass(slots=True)
class PairReplay:
    """Each pair is one request."""

    candidates: Sequence[Candidate]
    name: str = "pairs"

    def run(self, policy: Policy, seed: int) -> Tally:
        tally = Tally()
        for at in np.random.default_rng(seed).permutation(len(self.candidates)).tolist():
            candidate = self.candidates[at]
            served = policy.serves(candidate)
            if not served:
                policy.learn(candidate)
            tally.count(served, candidate.right)
        return tally


@dataclass(slots=True)
class StreamReplay:
    """Each question is one request to a cache of those before it; what has the same answer is not stored again."""

    nearest: NDArray[np.int64]  # [questions, _NEAREST]
    groups: NDArray[np.int64]  # [questions], equal where labels join them
    score: Callable[[int, int], float]
    name: str = "stream"

    def run(self, policy: Policy, seed: int) -> Tally:
        tally = Tally()
        stored = np.zeros(len(self.groups), np.bool_)
        for asked in np.random.default_rng(seed).permutation(len(self.groups)).tolist():
            near = self.nearest[asked]
            found = near[stored[near]]
            right = False
            if len(found):
                kept = int(found[0])
                right = bool(self.groups[asked] == self.groups[kept])
                candidate = Candidate(kept, self.score(asked, kept), right)
                if policy.serves(candidate):
                    tally.count(True, right)
                    continue
                policy.learn(candidate)
            tally.count(False, right)
            stored[asked] = not right
        return tally


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    pairs = read_pairs(chosen.pairs.read_text(encoding="utf-8").splitlines())
    questions = Questions(Embedder(chosen.encoder), pairs)
    print(f"{len(pairs):,} pairs of {len(questions.texts):,} questions; {chosen.seeds} orders of each replay")
    questions.print_neighbours()
    for what, score in (("cosine", questions.cosine), ("score", questions.score)):
        replays: tuple[Replay, ...] = (questions.pair_replay(score), questions.stream_replay(score))
        for replay in replays:
            print(f"{replay.name}, by {what}")
            _print_replay(replay, range(chosen.seeds))


def _print_replay(replay: Replay, seeds: Sequence[int]) -> None:
    singles = [
        [replay.run(SingleThreshold(least), seed) for seed in seeds] for least in np.linspace(0.3, 0.999, 40)
    ]
    for budget in BUDGETS:
        made: dict[str, Callable[[np.random.Generator], Policy]] = {
            "per question": partial(LogisticCurves, budget, False),
            "all together": partial(LogisticCurves, budget, True),
            "threshold": partial(LearnedThreshold, budget),
        }
        for name, make in made.items():
            tallies = [replay.run(make(np.random.default_rng(seed)), seed) for seed in seeds]
            error = float(np.mean([tally.error for tally in tallies]))
            kept = [tallies for tallies in singles if np.mean([tally.error for tally in tallies]) <= error]
            best = max(
                (np.mean([tally.hits / tally.requests for tally in tallies]) for tallies in kept), default=0.0
            )
            hits, wrong = sum(tally.hits for tally in tallies), sum(tally.wrong for tally in tallies)
            requests = sum(tally.requests for tally in tallies)
            print(
                f"  budget {budget:.0%}  {name:<14}hits {hits / requests:>6.2%}   wrong among requests {error:>6.2%}"
                f"{'' if error <= budget else ' (above it)'}, among hits {wrong / max(1, hits):>6.1%}"
                f"   one threshold with as many wrong: hits {best:>6.2%}"
            )


@dataclass(slots=True)
class Questions:
    """The questions of all pairs, with their embeddings."""

    embedder: Embedder
    pairs: Sequence[Pair]
    texts: list[str] = field(init=False)
    vectors: NDArray[np.float32] = field(init=False)
    _at: dict[str, int] = field(init=False)
    _scored: dict[tuple[int, int], float] = field(default_factory=dict)
    _verifier: Verifier = field(init=False)

    def __post_init__(self) -> None:
        self._verifier = default_verifier(self.embedder)
        texts = dict.fromkeys(text for pair in self.pairs for text in (pair.a, pair.b))
        embedded = {text: vector for text in texts if (vector := self.embedder(text)) is not None}
        self.texts = list(embedded)
        self.vectors = np.stack(list(embedded.values()))
        self._at = {text: at for at, text in enumerate(self.texts)}
        self.pairs = [pair for pair in self.pairs if pair.a in self._at and pair.b in self._at]

    def cosine(self, asked: int, kept: int) -> float:
        return float(self.vectors[asked] @ self.vectors[kept])

    def score(self, asked: int, kept: int) -> float:
        """Score of the default verifier; 0 where a guard forbids, or the two are not near."""
        if (asked, kept) not in self._scored:
            near = self.cosine(asked, kept)
            made = self._verifier.decide(self.texts[asked], self.texts[kept], near)
            self._scored[asked, kept] = made.score if made.forbidden is None and near >= FLOOR else 0.0
        return self._scored[asked, kept]

    def pair_replay(self, score: Callable[[int, int], float]) -> PairReplay:
        return PairReplay([
            Candidate(self._at[pair.b], score(self._at[pair.a], self._at[pair.b]), pair.same) for pair in self.pairs
        ])  # fmt: skip

    def stream_replay(self, score: Callable[[int, int], float]) -> StreamReplay:
        nearest = np.empty((len(self.texts), _NEAREST), np.int64)
        for rows in _blocks(len(self.texts)):
            cosines = self.vectors[rows] @ self.vectors.T
            cosines[np.arange(len(rows)), rows] = -1
            top = np.argpartition(-cosines, _NEAREST, axis=1)[:, :_NEAREST]
            order = np.argsort(-np.take_along_axis(cosines, top, axis=1), axis=1)
            nearest[rows] = np.take_along_axis(top, order, axis=1)
        return StreamReplay(nearest, self._groups(), score)

    def print_neighbours(self) -> None:
        """Hits at some shares of wrong ones among requests, by score alone and with what happened to neighbours."""
        order = np.random.default_rng(0).permutation(len(self.pairs))
        pairs = [self.pairs[at] for at in order]
        right = np.array([pair.same for pair in pairs])
        kept = self.vectors[[self._at[pair.b] for pair in pairs]]
        rated = {
            "cosine": np.array([self.cosine(self._at[pair.a], self._at[pair.b]) for pair in pairs]),
            "score": np.array([self.score(self._at[pair.a], self._at[pair.b]) for pair in pairs]),
        }
        logit = np.log(
            np.clip(rated["score"], 1e-6, 1 - 1e-6) / (1 - np.clip(rated["score"], 1e-6, 1 - 1e-6))
        )
        residuals = right - rated["score"]
        moved = np.zeros(len(pairs))
        for rows in _blocks(len(pairs)):
            weights = np.exp((kept[rows] @ kept[: rows[-1] + 1].T - 1) / _WIDTH)
            # Only what was before.
            weights *= np.arange(rows[-1] + 1)[None, :] < rows[:, None]
            moved[rows] = weights @ residuals[: rows[-1] + 1] / (_PRIOR + weights.sum(axis=1))
        for strength in (1.0, 2.0, 4.0):
            rated[f"neighbours, weight {strength:g}"] = np.where(
                rated["score"] > 0, logit + strength * moved, -np.inf
            )
        print("the best single threshold, when all labels are known: hits at wrong hits among requests of")
        second = slice(len(pairs) // 2, None)  # when there is something to learn from
        for name, values in rated.items():
            shares = "   ".join(
                f"{budget:.0%}: {_hits_at(values[second], right[second], budget):>6.2%}" for budget in BUDGETS
            )
            print(f"  {name:<24}{shares}")

    def _groups(self) -> NDArray[np.int64]:
        parent = list(range(len(self.texts)))

        def root(at: int) -> int:
            while parent[at] != at:
                parent[at] = at = parent[parent[at]]
            return at

        for pair in self.pairs:
            if pair.same:
                parent[root(self._at[pair.a])] = root(self._at[pair.b])
        return np.array([root(at) for at in range(len(parent))])


def _hits_at(values: Floats, right: NDArray[np.bool_], error: float) -> float:
    order = np.argsort(-values)
    order = order[np.isfinite(values[order])]
    wrong = np.cumsum(~right[order])
    within = np.flatnonzero(wrong <= error * len(right))
    return 0.0 if not len(within) else float((within[-1] + 1) / len(right))


def _blocks(count: int, size: int = 512) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, size):
        yield np.arange(start, min(count, start + size))


if __name__ == "__main__":
    main()
