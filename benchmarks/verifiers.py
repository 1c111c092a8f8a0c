"""The judges of near questions side by side: the cosine, and a cross-encoder.

    python benchmarks/verifiers.py ENCODER --verifier FOLDER --pairs FILE [--held-out]

ENCODER is a folder as `export_encoder` makes it of all-MiniLM-L6-v2; FOLDER holds a cross-encoder with its graph, as
`export_cross_encoder` makes it; FILE holds labelled pairs, as `pipeline cache tune` reads them. Told is the share of
true pairs that each judge serves where it serves a given share of the traps, with the guards on, and the processor time
that one comparison takes (median). --held-out takes the third of the pairs that scripts/train_verifier leaves aside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pipeline.cache.semantic.cross_encoder import CrossEncoder, CrossEncoderVerifier
from pipeline.cache.semantic.decision import default_verifier
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.guards import GUARDS, findings
from pipeline.cache.tuning.measuring import CountedShare, PairMeasurements, measure
from pipeline.cache.tuning.pairs import question_groups, read_pairs

SHARES = (0.005, 0.01, 0.02, 0.05)  # of the traps
_TIMED = 200  # pairs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("encoder", type=Path)
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--held-out", action="store_true")
    given = parser.parse_args()
    pairs = read_pairs(given.pairs.read_text(encoding="utf-8").splitlines())
    if given.held_out:
        pairs = [pair for pair, group in zip(pairs, question_groups(pairs), strict=True) if group % 3 == 0]
    embedder, model = Embedder(given.encoder), CrossEncoder(given.verifier)
    unguarded = default_verifier(embedder, ())
    measured = measure(
        pairs,
        embedder,
        {"cosine": unguarded, "cross-encoder": CrossEncoderVerifier(unguarded, model)},
        findings,
        tuple(GUARDS),
    )
    print(f"{len(pairs):,} pairs: {measured.same.sum():,} true, {(~measured.same).sum():,} traps")
    print("true pairs served where so many traps are, with the guards:")
    print(f"  {'traps':<16}" + "".join(f"{share:>26.1%}" for share in SHARES))
    for name, values in measured.scores.items():
        print(f"  {name:<16}" + "".join(f"{_told(measured, values, share):>26}" for share in SHARES))
    for name, compare in (
        ("guards", lambda first, second: unguarded.decide(first, second, 0.9)),
        ("cross-encoder", model),
    ):
        spent = _milliseconds(compare, [(pair.a, pair.b) for pair in pairs])
        print(f"  processor time of one comparison, {name}: {spent:.2f} ms")


def _told(
    measured: PairMeasurements, values: np.ndarray[tuple[int], np.dtype[np.float64]], share: float
) -> str:
    passing = np.where(measured.unforbidden(measured.guards), values, -np.inf)
    traps = np.sort(passing[~measured.same])[::-1]
    above = traps[int(share * len(traps))]
    served = CountedShare(int((passing[measured.same] > above).sum()), int(measured.same.sum()))
    return f"{served.value:.1%} ({served.low():.1%} to {served.high():.1%})"


def _milliseconds(compare: Callable[[str, str], object], pairs: list[tuple[str, str]]) -> float:
    compare(*pairs[0])
    times = []
    for first, second in pairs[:_TIMED]:
        # One that has not been read before.
        asked = f"Hello, {first}"
        start = time.thread_time()
        compare(asked, second)
        times.append(1e3 * (time.thread_time() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
