"""A near hit for a person to judge: the question that was asked beside the one whose answer it got."""

from __future__ import annotations

import textwrap
from itertools import zip_longest

from pipeline.cache.near_hits import NearHit
from pipeline.cli.output import output_width

_ANSWER_LINES = 8
_WIDTH = 100  # columns where standard output is no terminal


def side_by_side(hit: NearHit, answer: str | None, place: str) -> str:
    """Write a near hit in two columns, with its answer below.

    Args:
        hit: that was served.
        answer: that it got; None if it is gone.
        place: which one it is, such as "1 of 50, random".
    """
    width = output_width(_WIDTH)
    half = max(20, (width - 3) // 2)
    columns = [
        [title, *textwrap.wrap(text, half, break_on_hyphens=False)]
        for title, text in (("asked", hit.question.turn), ("answered as", hit.kept))
    ]
    rows = [f"{left.ljust(half)} | {right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")]
    told = ["(the answer is gone)"] if answer is None else textwrap.wrap(answer, width - 2)
    if len(told) > _ANSWER_LINES:
        told = [*told[:_ANSWER_LINES], "…"]
    head = f"{place}, similarity {hit.similarity:.2f}, id {hit.question.key.hex()[:12]}"
    if hit.shadow:
        head += ", found and not served"
    return "\n".join(["", head, *rows, "", *(f"  {line}" for line in told), ""])
