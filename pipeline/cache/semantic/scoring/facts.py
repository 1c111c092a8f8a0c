"""What is known of two questions beside the states of their tokens: how near they are, and what the checks say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import log1p

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.semantic.verification.alignment import aligned
from pipeline.cache.semantic.verification.checks import CHECKS, SURE
from pipeline.cache.semantic.verification.parsed_question import Reading, read

_MANY = 3  # words that only one side has: more of them say nothing more
# What an objection is about: the words before its colon. Others count as "other".
KINDS = (
    "numbers", "numbers have changed places", "codes", "quotations", "names", "openings", "pronouns",
    "pronouns have changed places", "tenses", "and, or", "opposites", "negation", "words", "order", "places",
    "direction", "scope", "time", "comparison", "duty", "other",
)  # fmt: skip
MEASURES = ("similarity", "shared", "fewest left", "most left", "length", "objections")
NAMES = (*MEASURES, *KINDS)


@dataclass(frozen=True, slots=True)
class Facts:
    """Of two questions; their order does not matter."""

    values: NDArray[np.float32]  # [len(NAMES)]
    objections: Mapping[str, str]  # check: what it says
    forbidding: frozenset[str]  # those of them whose word is the last one

    def forbidden(self, checks: Collection[str]) -> str | None:
        """What forbids a hit whatever else is known, by the given checks."""
        return next(
            (told for name, told in self.objections.items() if name in self.forbidding and name in checks),
            None,
        )


def facts(asked: str, kept: str, similarity: float) -> Facts:
    """`similarity` is the cosine of the embeddings."""
    one, other = (read(text) for text in sorted((asked, kept)))
    objections = {name: found for name, check in CHECKS.items() if (found := check(one, other)) is not None}
    said = {text.partition(":")[0] for text in objections.values()}
    kinds = {kind if kind in KINDS else "other" for kind in said}
    values = [*_measures(one, other, similarity, len(objections)), *(float(kind in kinds) for kind in KINDS)]
    return Facts(np.array(values, np.float32), objections, _forbidding(one, other, objections))


def _forbidding(one: Reading, other: Reading, objections: Mapping[str, str]) -> frozenset[str]:
    """Where both say something, but not the same (what only one says may be another wording), or it has moved."""
    said = {
        "numbers": (one.numbers, other.numbers),
        "codes": (one.codes - other.said, other.codes - one.said),
        "quotes": (one.quotes, other.quotes),
        "joining": (one.joined, other.joined),
        "tenses": (one.tenses - other.tenses, other.tenses - one.tenses),
        "names": (one.names - other.said, other.names - one.said),
    }
    both = {name for name, (here, there) in said.items() if here and there}
    if len(one.numbers) == 1 and not objections.get("numbers", "").startswith("numbers:"):
        both.discard("numbers")  # the same number in another place: "by 40", "at the age of 40"
    if ("used-to" in one.telling) != ("used-to" in other.telling):
        both.add("sense")
    beside, named = aligned(one, other), one.names & other.names
    moved = {first.stem for first, _ in beside.moved} & named
    traded = objections.get("order") in SURE
    if traded or len(moved) > 1 or not named.isdisjoint(beside.swapped or ()):
        both.add("order")
    return frozenset(both & set(objections))


def _measures(one: Reading, other: Reading, similarity: float, objections: int) -> tuple[float, ...]:
    beside = aligned(one, other)
    left = sorted(min(len(set(words)), _MANY) for words in (beside.left, beside.right))
    shared = len(one.said & other.said) / max(1, len(one.said | other.said))
    return similarity, shared, *left, log1p(len(one.words) + len(other.words)), objections
