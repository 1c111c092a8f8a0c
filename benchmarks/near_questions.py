"""How near questions are judged: how often rightly, beside the cosine of the embeddings alone, and in what time.

    python benchmarks/near_questions.py ENCODER --pairs FILE [--pairs FILE]...

ENCODER is a folder as `export_encoder` makes it of all-MiniLM-L6-v2. Each FILE is a set of pairs that people wrote and
labelled, such as Quora Question Pairs, a JSON object a line: {"a": "…", "b": "…", "same": 1, "category": "…"}, where
same is 0 for a trap: two questions that one answer does not serve. Categories with enough pairs are judged by
themselves, too.

First what a recipe's defaults serve, with 95 % intervals; then, for shares of the traps that may be served, the share
of true pairs that the decision serves, and that the cosine alone does. Times are medians of one comparison: of a new
question with one that was compared before, and with one that was not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cache.semantic.decision import Verifier, default_verifier
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.tuning.measuring import CountedShare
from pipeline.cache.tuning.pairs import Pair, read_pairs
from pipeline.recipe.response_cache import SemanticSettings

SHARES = (0.005, 0.01, 0.02, 0.05)  # of the traps that may be served
_TIMED = 300  # pairs
_ENOUGH = 100  # pairs of each label, for a category to be judged by itself
NEVER = -1.0  # score of a pair that is not served at any threshold


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """A labelled pair, and what is made of it."""

    pair: Pair
    cosine: float
    # NEVER where a guard forbids it, or the cosine is below the recipe's floor.
    score: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--pairs", type=Path, action="append", required=True)
    chosen = parser.parse_args()
    embedder = Embedder(chosen.encoder)
    verifier = default_verifier(embedder)
    floor = SemanticSettings().min_similarity
    for file in chosen.pairs:
        pairs = read_pairs(file.read_text(encoding="utf-8").splitlines())
        judged = [_judged(pair, embedder, verifier, floor) for pair in pairs]
        print(
            f"{file.name}: {len(pairs):,} pairs; cosine at least {floor}, score {verifier.default_min_score}"
        )
        report(judged, verifier.default_min_score)
        for category in _large(pairs):
            of_it = [one for one in judged if one.pair.category == category]
            if len(of_it) < len(judged):
                print(f" {category}")
                report(of_it, verifier.default_min_score)
        _time(embedder, default_verifier(embedder), judged)


def _judged(pair: Pair, embedder: Embedder, verifier: Verifier, floor: float) -> JudgedPair:
    one, other = embedder(pair.a), embedder(pair.b)
    if one is None or other is None:
        return JudgedPair(pair, NEVER, NEVER)
    cosine = float(one @ other)
    found = verifier.decide(pair.a, pair.b, cosine)
    passes = found.forbidden is None and cosine >= floor
    return JudgedPair(pair, cosine, found.score if passes else NEVER)


def _large(pairs: Sequence[Pair]) -> list[str]:
    """Categories with enough pairs of each label, in their order."""
    counts = Counter((pair.category, pair.same) for pair in pairs)
    found = dict.fromkeys(pair.category for pair in pairs)
    return [category for category in found if min(counts[category, True], counts[category, False]) >= _ENOUGH]


def report(judged: Sequence[JudgedPair], min_score: float) -> None:
    """Print what is served at a threshold, what the cosine serves with as many traps, and both curves."""
    same = [one.pair.same for one in judged]
    scores, cosines = [one.score for one in judged], [one.cosine for one in judged]
    served = [score >= min_score for score in scores]
    _print("true pairs served", [yes for yes, true in zip(served, same, strict=True) if true])
    traps = [yes for yes, true in zip(served, same, strict=True) if not true]
    _print("traps served", traps)
    _print("by the cosine, as many traps", true_pairs_served(cosines, same, sum(traps)))
    print(f"  {'where of the traps':<30}" + "".join(f"{share:>8.1%}" for share in SHARES))
    for name, values in (("the decision serves", scores), ("the cosine serves", cosines)):
        curve = [true_pairs_served(values, same, int(share * len(traps))) for share in SHARES]
        print(
            f"  {name:<30}" + "".join(f"{CountedShare(sum(some), len(some)).value:>8.1%}" for some in curve)
        )


def true_pairs_served(values: Sequence[float], same: Sequence[bool], traps: int) -> list[bool]:
    """Which true pairs are served at the lowest threshold that serves no more than so many traps."""
    others = sorted((value for value, true in zip(values, same, strict=True) if not true), reverse=True)
    above = others[traps] if traps < len(others) else NEVER
    return [value > above for value, true in zip(values, same, strict=True) if true]


def _print(what: str, served: Sequence[bool]) -> None:
    share = CountedShare(sum(served), len(served))
    print(
        f"  {what:<30}{share.count:>5} of {share.of:<6}{share.value:>7.1%}"
        f"   95 % interval {share.low(0.95):.1%} to {share.high(0.95):.1%}"
    )


def _time(embedder: Embedder, verifier: Verifier, judged: Sequence[JudgedPair]) -> None:
    """The new question has been embedded, as it has when a cache looks it up."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for one in judged[:_TIMED]:
        for before, spent in times.items():
            asked, kept = f"{one.pair.a} {before}", f"{one.pair.b} {before}"
            if before:
                verifier.prepare(kept)
            embedder(asked)
            verifier.prepare(asked)
            start = time.perf_counter()
            verifier.decide(asked, kept, one.cosine)
            spent.append(1e3 * (time.perf_counter() - start))
    before, never = (statistics.median(spent) for spent in times.values())
    print(f"  one comparison {before:.3f} ms; with a question that was never compared {never:.3f} ms")


if __name__ == "__main__":
    main()
