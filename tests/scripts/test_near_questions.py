"""benchmarks/near_questions.py: any labelled pairs, judged beside the cosine alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.near_questions import NEVER, JudgedPair, read_intents, replay, report
from pipeline.cache.semantic.decision import default_verifier
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


class Directions:
    """An embedder: questions about the same word are near each other, those about none are near none."""

    def __call__(self, text: str) -> np.ndarray:
        vector = np.full(3, 0.01 * (len(text) % 5))
        vector[["card", "rate"].index(text.split()[-1]) if "about" in text else 2] = 1
        return vector / np.linalg.norm(vector)


def test_a_replay_counts_what_is_served_and_whose_answer_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "questions.csv"
    file.write_text(
        "text,category\n"
        + "".join(
            f"{how} about the card,card\n" for how in ("Tell us", "Say something", "Please speak", "Speak")
        )
        + "".join(
            f'"Say, it is about the rate",{intent}\n' for intent in ("rate", "rate", "rate", "other rate")
        )
    )
    embedder = Directions()
    verifier = default_verifier(None)
    replay(read_intents(file), ["What is the weather?"], embedder, verifier)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 intents: 4 questions stored, 4 asked"
    assert "4 of 4" in lines[2]
    # One of the two intents that ask the same words gets the other's answer, whichever half it fell into.
    assert "1 of 4" in lines[3]
    assert "0 of 1" in lines[5]
