"""How near questions are judged: how often rightly, beside the cosine of the embeddings alone, and in what time.

    python benchmarks/near_questions.py ENCODER --pairs FILE [--pairs FILE]... [--each-guard]
    python benchmarks/near_questions.py ENCODER --intents FILE [--out-of-scope FILE]

ENCODER is a folder as `export_encoder` makes it of all-MiniLM-L6-v2. All data is what people wrote and labelled.

--pairs: a set such as Quora Question Pairs, a JSON object a line: {"a": "…", "b": "…", "same": 1, "category": "…"},
where same is 0 for a trap: two questions that one answer does not serve. First what a recipe's defaults serve, with
95 % intervals, and the lowest threshold that serves few enough traps; then, for shares of the traps that may be served,
the share of true pairs that is served with the guards, and by the cosine alone. Categories (such as a language) with
enough pairs are judged by themselves, too, and those of whose traps any is served are listed. --each-guard leaves out
one after another. Times are the processor's, medians of one comparison: of a new question with one that was compared
before, and with one that was not.

--intents: questions with what they want, as CSV (a line "text,category" first) or a JSON object a line: {"text": "…",
"category": "…"}. Half of them are stored, and the other half is asked: how many are served, how many of them with the
answer to a question of another intent, and with how many the cosine alone would, that serves as many. --out-of-scope: a
question a line, to which nothing that is stored is an answer; all are asked, and none should be served.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.cache.backend import Vector
from pipeline.cache.semantic.decision import Verifier, default_verifier
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.guards import GUARDS, findings
from pipeline.cache.semantic.layer import is_shareable
from pipeline.cache.tuning.measuring import CountedShare
from pipeline.cache.tuning.pairs import Pair, read_pairs
from pipeline.recipe.response_cache import SemanticSettings

SHARES = (0.005, 0.01, 0.02, 0.05)  # of the traps that may be served
FEW = 0.0125  # of the traps
_TIMED = 300  # pairs
_ENOUGH = 50  # pairs of each label, for a category to be judged by itself
_CANDIDATES = 4  # that a cache looks at
NEVER = -1.0  # score of a pair that is not served at any threshold
FLOOR = SemanticSettings().min_similarity


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """A labelled pair, and what is made of it."""

    pair: Pair
    cosine: float
    # NEVER where the cosine is below the recipe's floor.
    score: float
    # The guards that forbid it.
    forbidden: frozenset[str] = frozenset()

    def passing(self, without: str = "") -> float:
        """The score; NEVER where a guard forbids it, one of them left out."""
        return NEVER if self.forbidden - {without} else self.score


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--pairs", type=Path, action="append", default=[])
    parser.add_argument("--each-guard", action="store_true")
    parser.add_argument("--intents", type=Path)
    parser.add_argument("--out-of-scope", type=Path)
    chosen = parser.parse_args()
    embedder = Embedder(chosen.encoder)
    verifier = default_verifier(embedder)
    for file in chosen.pairs:
        pairs = read_pairs(file.read_text(encoding="utf-8").splitlines())
        judged = [_judged(pair, embedder) for pair in pairs]
        print(
            f"{file.name}: {len(pairs):,} pairs; cosine at least {FLOOR}, score {verifier.default_min_score}"
        )
        report(judged, verifier.default_min_score)
        if chosen.each_guard:
            guards_alone(judged)
        for category in _large(pairs):
            of_it = [outcome for outcome in judged if outcome.pair.category == category]
            if len(of_it) < len(judged):
                print(f" {category}")
                report(of_it, verifier.default_min_score)
        traps_by_category(judged, verifier.default_min_score)
        _time(embedder, verifier, judged)
    if chosen.intents is not None:
        asked = [] if chosen.out_of_scope is None else chosen.out_of_scope.read_text("utf-8").splitlines()
        replay(read_intents(chosen.intents), [text for text in asked if text.strip()], embedder, verifier)


def _judged(pair: Pair, embedder: Embedder) -> JudgedPair:
    first, second = _vector(pair.a, embedder), _vector(pair.b, embedder)
    if first is None or second is None:
        return JudgedPair(pair, NEVER, NEVER)
    cosine = float(first @ second)
    score = default_verifier(None, ()).decide(pair.a, pair.b, cosine).score
    return JudgedPair(pair, cosine, score if cosine >= FLOOR else NEVER, frozenset(findings(pair.a, pair.b)))


def _large(pairs: Sequence[Pair]) -> list[str]:
    """Categories with enough pairs of each label, in their order."""
    counts = Counter((pair.category, pair.same) for pair in pairs)
    found = dict.fromkeys(pair.category for pair in pairs)
    return [category for category in found if min(counts[category, True], counts[category, False]) >= _ENOUGH]


def report(judged: Sequence[JudgedPair], min_score: float) -> None:
    """Print what is served at a threshold, what the cosine serves with as many traps, and both curves."""
    same = [outcome.pair.same for outcome in judged]
    scores, cosines = [outcome.passing() for outcome in judged], [outcome.cosine for outcome in judged]
    served = [score >= min_score for score in scores]
    _print("true pairs served", [yes for yes, true in zip(served, same, strict=True) if true])
    traps = [yes for yes, true in zip(served, same, strict=True) if not true]
    _print("traps served", traps)
    _print("by the cosine, as many traps", true_pairs_served(cosines, same, sum(traps)))
    others = np.array([score for score, true in zip(scores, same, strict=True) if not true])
    lowest = next(step / 100 for step in range(80, 102) if (others >= step / 100).mean() <= FEW)
    print(f"  at most {FEW:.2%} of the traps are served from a score of {lowest:.2f} on")
    print(f"  {'where of the traps':<30}" + "".join(f"{share:>8.1%}" for share in SHARES))
    for name, values in (("with the guards", scores), ("by the cosine alone", cosines)):
        _curve(name, values, same)


def guards_alone(judged: Sequence[JudgedPair]) -> None:
    """Print the curve without each guard, and what it alone finds of near pairs."""
    same = [outcome.pair.same for outcome in judged]
    for guard in GUARDS:
        alone = [
            outcome.pair.same for outcome in judged if outcome.forbidden == {guard} and outcome.score != NEVER
        ]
        found = f"(alone forbids {alone.count(False)} traps, {alone.count(True)} true pairs)"
        _curve(f"without {guard}", [outcome.passing(guard) for outcome in judged], same, found)


def traps_by_category(judged: Sequence[JudgedPair], min_score: float) -> None:
    """Print the categories of whose traps any is served."""
    traps = Counter(outcome.pair.category for outcome in judged if not outcome.pair.same)
    served = Counter(
        outcome.pair.category
        for outcome in judged
        if not outcome.pair.same and outcome.passing() >= min_score
    )
    for category, count in served.most_common() if len(traps) > 1 else ():
        print(f"  traps served of {category!r}: {count} of {traps[category]}")


def true_pairs_served(values: Sequence[float], same: Sequence[bool], traps: int) -> list[bool]:
    """Which true pairs are served at the lowest threshold that serves no more than so many traps."""
    others = sorted((value for value, true in zip(values, same, strict=True) if not true), reverse=True)
    above = others[traps] if traps < len(others) else NEVER
    return [value > above for value, true in zip(values, same, strict=True) if true]


def read_intents(file: Path) -> list[tuple[str, str]]:
    """Read questions and what they want, by the names "text" and "category"."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines) if file.suffix == ".csv" else map(json.loads, lines)
        return [(row["text"], row["category"]) for row in rows]


def replay(
    questions: Sequence[tuple[str, str]], out_of_scope: Sequence[str], embedder: Embedder, verifier: Verifier
) -> None:
    """Store one half and ask the other."""
    shuffled = [questions[at] for at in np.random.default_rng(0).permutation(len(questions))]
    kept, asked = shuffled[::2], shuffled[1::2]
    intents = len({intent for _, intent in questions})
    print(f"{intents} intents: {len(kept):,} questions stored, {len(asked):,} asked")
    stored = [(text, intent) for text, intent in kept if _vector(text, embedder) is not None]
    texts = [text for text, _ in stored]
    vectors = np.stack([embedder(text) for text in texts])
    # The highest cosine, whether its question has the same intent, and the same of what is served.
    found: list[tuple[float, bool, bool | None]] = []
    for text, intent in asked:
        if _vector(text, embedder) is None:
            continue
        near, at = _served(text, texts, vectors, embedder, verifier)
        found.append((near[0], stored[near[1]][1] == intent, None if at is None else stored[at][1] == intent))
    served = [right for _, _, right in found if right is not None]
    nearest = [right for _, right, _ in sorted(found, reverse=True)[: len(served)]]
    print(f" {len(found):,} of the questions asked are looked up by meaning")
    _print("served", [right is not None for _, _, right in found], len(asked))
    _print("with another intent's answer", [not right for right in served], len(asked))
    _print("by the cosine, as many served", [not right for right in nearest], len(asked))
    if out_of_scope:
        lost = [
            _vector(text, embedder) is not None
            and _served(text, texts, vectors, embedder, verifier)[1] is not None
            for text in out_of_scope
        ]
        _print("out of scope, served", lost)


def _vector(text: str, embedder: Embedder) -> Vector | None:
    """The embedding, as a recipe's defaults have it: None for what is not shared by meaning."""
    return embedder(text) if is_shareable(text, SemanticSettings().languages) else None


def _served(
    text: str, stored: Sequence[str], vectors: np.ndarray, embedder: Embedder, verifier: Verifier
) -> tuple[tuple[float, int], int | None]:
    """The nearest question, with its cosine; and the one that is served, as a cache chooses it."""
    cosines = vectors @ embedder(text)
    nearest = np.argsort(-cosines)[:_CANDIDATES]
    passing = (
        int(at)
        for at in nearest
        if cosines[at] >= FLOOR
        and verifier.decide(text, stored[at], float(cosines[at])).serves(verifier.default_min_score)
    )
    return (float(cosines[nearest[0]]), int(nearest[0])), next(passing, None)


def _curve(name: str, values: Sequence[float], same: Sequence[bool], more: str = "") -> None:
    traps = same.count(False)
    curve = [true_pairs_served(values, same, int(share * traps)) for share in SHARES]
    print(f"  {name:<30}" + "".join(f"{sum(some) / max(1, len(some)):>8.1%}" for some in curve) + f"  {more}")


def _print(what: str, served: Sequence[bool], of: int | None = None) -> None:
    share = CountedShare(sum(served), len(served) if of is None else of)
    print(
        f"  {what:<30}{share.count:>5} of {share.of:<6}{share.value:>7.1%}"
        f"   95 % interval {share.low(0.95):.1%} to {share.high(0.95):.1%}"
    )


def _time(embedder: Embedder, verifier: Verifier, judged: Sequence[JudgedPair]) -> None:
    """The new question has been embedded, as it has when a cache looks it up."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for outcome in judged[:_TIMED]:
        for before, spent in times.items():
            asked, kept = f"{outcome.pair.a} {before}", f"{outcome.pair.b} {before}"
            if before:
                verifier.prepare(kept)
            embedder(asked)
            verifier.prepare(asked)
            start = time.thread_time()
            verifier.decide(asked, kept, outcome.cosine)
            spent.append(1e3 * (time.thread_time() - start))
    before, never = (statistics.median(spent) for spent in times.values())
    print(
        f"  processor time of one comparison {before:.3f} ms; with a question that was never compared {never:.3f} ms"
    )


if __name__ == "__main__":
    main()
