"""How near questions are judged: by the checks alone, and with the learned scorer; how often rightly, and in what time.

    python benchmarks/near_questions.py ENCODER [--pairs FILE]...

ENCODER is a folder as `export_encoder` makes it of all-MiniLM-L6-v2. Each FILE is a set of
pairs, a JSON object a line: {"a": "…", "b": "…", "same": 1, "category": "…"}, where same is 0 for a trap: two questions
that one answer does not serve. Categories with enough pairs are judged by themselves, too. What people wrote, such as
Quora Question Pairs, says most about questions that people ask. Without a FILE, the pairs are those of
scripts/questions/aside, which language models wrote: as they occur in a log, and as hard as their authors could make
them.

Beside the scorer stands the cosine of the embeddings alone, at the threshold that serves as many traps as the scorer
does. Times are medians of one comparison: of a new question with one that was compared before, and with one that was
not (which the encoder has to read again).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.layer import Verifier
from pipeline.cache.semantic.scoring import verifier_for
from pipeline.cache.semantic.verification import default_verifier
from pipeline.cache.tuning.measuring import CountedShare
from pipeline.cache.tuning.pairs import Pair, read_pairs

ASIDE = Path(__file__).resolve().parent.parent / "scripts/questions/aside"
MIN_SIMILARITY = 0.45  # the default of a recipe
_TIMED = 300  # pairs
_ENOUGH = 100  # pairs of each label, for a category to be judged by itself


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--pairs", type=Path, action="append")
    chosen = parser.parse_args()
    embedder = Embedder(chosen.encoder)
    as_in_a_log = sorted(ASIDE.glob("log_*.jsonl"))
    hard = sorted({*ASIDE.glob("*.jsonl")} - {*as_in_a_log})
    for files in [[file] for file in chosen.pairs] if chosen.pairs else [as_in_a_log, hard]:
        _judge_all(chosen.encoder, embedder, files)


def _judge_all(encoder: Path, embedder: Embedder, files: list[Path]) -> None:
    pairs = [pair for file in files for pair in read_pairs(file.read_text(encoding="utf-8").splitlines())]
    nears = [_cosine(embedder, pair) for pair in pairs]
    print(f"{len(pairs):,} pairs of {', '.join(map(str, files))}; similarity at least {MIN_SIMILARITY}")
    served = {
        name: [
            near >= MIN_SIMILARITY and verifier.objection(pair.a, pair.b, near) is None
            for pair, near in zip(pairs, nears, strict=True)
        ]
        for name, verifier in (
            ("checks alone", default_verifier()),
            ("with the scorer", verifier_for(embedder, scorer=True)),
        )
    }
    judge(range(len(pairs)), pairs, nears, served)
    for category in _large(pairs):
        rows = [at for at, pair in enumerate(pairs) if pair.category == category]
        if len(rows) < len(pairs):
            print(f" {category}")
            judge(rows, pairs, nears, served)
    another = Embedder(encoder)  # that has not seen the questions yet
    for name, verifier in (
        ("checks alone", default_verifier()),
        ("with the scorer", verifier_for(another, scorer=True)),
    ):
        _time(name, another, verifier, pairs, nears)


def _large(pairs: list[Pair]) -> list[str]:
    """Categories with enough pairs of each label, in their order."""
    counts = Counter((pair.category, pair.same) for pair in pairs)
    found = dict.fromkeys(pair.category for pair in pairs)
    return [category for category in found if min(counts[category, True], counts[category, False]) >= _ENOUGH]


def judge(
    rows: Sequence[int], pairs: list[Pair], nears: list[float], served: Mapping[str, list[bool]]
) -> None:
    """Print what each verifier serves of some pairs, and what the cosine serves with as many traps as the last."""
    for name, yes in served.items():
        for same, what in ((True, "true pairs served"), (False, "traps served")):
            _print(name, what, [yes[at] for at in rows if pairs[at].same is same])
    traps = sum(yes[at] for at in rows if not pairs[at].same)
    others = sorted((nears[at] for at in rows if not pairs[at].same), reverse=True)
    above = others[traps] if traps < len(others) else -1.0  # the nearest trap that is not served
    _print("cosine alone", f"above {above:.3f}", [nears[at] > above for at in rows if pairs[at].same])


def _print(name: str, what: str, served: list[bool]) -> None:
    share = CountedShare(sum(served), len(served))
    print(
        f"  {name:<18}{what:<20}{share.count:>5} of {share.of:<6}{share.value:>7.1%}"
        f"   95 % interval {share.low(0.95):.1%} to {share.high(0.95):.1%}"
    )


def _time(name: str, embedder: Embedder, verifier: Verifier, pairs: list[Pair], nears: list[float]) -> None:
    """The new question has been embedded, as it has when a cache looks it up."""
    kept_before: list[float] = []
    kept_never: list[float] = []
    for pair, near in zip(pairs[:_TIMED], nears, strict=False):
        for times, kept in ((kept_before, pair.b), (kept_never, f"{pair.b} Please!")):
            asked = f"{'Hello' if times is kept_before else 'Hi'}, {pair.a} ({name})"
            if times is kept_before:
                verifier.objection(pair.b, f"{pair.b} Thanks!", 0.9)
            embedder(asked)
            start = time.perf_counter()
            verifier.objection(asked, kept, near)
            times.append(1e3 * (time.perf_counter() - start))
    print(
        f"  {name:<18}one comparison      {statistics.median(kept_before):.3f} ms; "
        f"with a question that is new too {statistics.median(kept_never):.3f} ms"
    )


def _cosine(embedder: Embedder, pair: Pair) -> float:
    one, other = embedder(pair.a), embedder(pair.b)
    return -1.0 if one is None or other is None else float(one @ other)


if __name__ == "__main__":
    main()
