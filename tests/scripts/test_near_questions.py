"""benchmarks/near_questions.py: any labelled pairs, judged beside the cosine alone."""

from __future__ import annotations

import pytest

from benchmarks.near_questions import NEVER, JudgedPair, report
from pipeline.cache.tuning.pairs import Pair


@pytest.mark.parametrize(
    ("scores", "decided", "traps", "by_cosine"),
    [
        # One trap is served: with the cosine the one at 0.95 may be, and what is nearer than the next one, 0.7.
        ([0.9, 0.2, NEVER, 0.9, 0.1, NEVER], "1 of 3", "1 of 3", "2 of 3"),
        ([NEVER, 0.9, 0.9, 0.1, 0.1, 0.1], "2 of 3", "0 of 3", "0 of 3"),
        ([0.9] * 6, "3 of 3", "3 of 3", "3 of 3"),
    ],
)
def test_the_cosine_is_held_to_as_many_traps(
    capsys: pytest.CaptureFixture[str], scores: list[float], decided: str, traps: str, by_cosine: str
) -> None:
    cosines = [0.9, 0.8, 0.6, 0.95, 0.7, 0.5]
    judged = [
        JudgedPair(Pair("a", "b", at < 3), cosine, score)
        for at, (cosine, score) in enumerate(zip(cosines, scores, strict=True))
    ]
    report(judged, 0.8)
    lines = capsys.readouterr().out.splitlines()
    for line, share in zip(lines, (decided, traps, by_cosine), strict=False):
        assert share in line
