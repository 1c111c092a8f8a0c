"""What a log of questions tells of a semantic cache, for people and as JSON."""

from __future__ import annotations

import json

from pipeline.cache.tuning.measuring import FLOORS
from pipeline.cache.tuning.repeats import MIN_SIMILARITY, MOST, Repeats

_EXAMPLES = 5
_FLOORS = [floor for floor in FLOORS if floor >= MIN_SIMILARITY]


def repeats_page(found: Repeats) -> str:
    """How many near repeats there are; which of them may share an answer only a person can say."""
    last = f" among the last {MOST:,}" if found.questions > MOST else ""
    lines = [
        f"{found.questions:,} questions, {found.different:,} different ones{last}",
        "",
        f"  {'min_similarity':<16}{'pairs as near':<16}that would share an answer",
    ]
    lines += [f"  {at:<16.2f}{found.near(at):<16,}{found.served(at):,}" for at in _FLOORS]
    merged = found.merged()
    examples = merged[:: max(1, len(merged) // _EXAMPLES)][:_EXAMPLES]
    none = f"no pair is nearer than {MIN_SIMILARITY} and would share an answer"
    lines += ["", "would share an answer:" if examples else none]
    lines += [f"  {near.similarity:.2f}  {near.a}  |  {near.b}" for near in examples]
    return "\n".join(
        [
            *lines,
            "",
            "Which of them may share one, only a person can say: --output, label them, and give them as --pairs.",
        ]
    )


def repeats_json(found: Repeats) -> str:
    """The same, with every threshold."""
    rows = [{"min_similarity": at, "near": found.near(at), "pass": found.served(at)} for at in _FLOORS]
    return json.dumps(
        {"questions": found.questions, "different": found.different, "thresholds": rows}, indent=2
    )
