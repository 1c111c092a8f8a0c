"""benchmarks/near_questions.py: any labelled pairs, judged beside the cosine alone."""

from __future__ import annotations

import pytest

from benchmarks.near_questions import judge
from pipeline.cache.tuning.pairs import Pair


def test_the_cosine_is_held_to_as_many_traps(capsys: pytest.CaptureFixture[str]) -> None:
    cosines = {True: [0.9, 0.8, 0.6], False: [0.95, 0.7, 0.5]}
    pairs = [Pair("a", "b", same) for same, nears in cosines.items() for _ in nears]
    nears = [*cosines[True], *cosines[False]]
    for served, above, share in (
        ([True, False, False, True, False, False], 0.7, "2 of 3"),  # one trap: the one at 0.95 may pass
        ([True, True, True, False, False, False], 0.95, "0 of 3"),
        ([True] * 6, -1.0, "3 of 3"),
    ):
        judge(range(6), pairs, nears, {"checks": [False] * 6, "scorer": served})
        *_, scorer, traps, cosine = capsys.readouterr().out.splitlines()
        assert f"{sum(served[:3])} of 3" in scorer
        assert f"{sum(served[3:])} of 3" in traps
        assert f"above {above:.3f}" in cosine
        assert share in cosine
