"""The words of two questions, each beside the one that says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeline.cache.semantic.verification.lexicon import lexicon
from pipeline.cache.semantic.verification.parsed_question import Reading, Word


@dataclass(frozen=True, slots=True)
class Alignment:
    """What is left of two questions when equal words are put side by side."""

    left: tuple[str, ...]  # stems that only the one has
    right: tuple[str, ...]  # and the other
    opposed: tuple[tuple[str, str], ...]  # opposites, side by side
    moved: tuple[tuple[Word, Word], ...]  # the same word with another preposition
    swapped: tuple[str, str] | None  # two words that have changed places without one
    neighbours: bool  # the two stand side by side in both


@lru_cache(1)
def aligned(one: Reading, other: Reading) -> Alignment:
    """Of the two that are being judged: several checks ask for it, one after the other."""
    return align(one.words, other.words)


def align(one: Sequence[Word], other: Sequence[Word]) -> Alignment:
    """Equal words first, then synonyms, then opposites; words that are there twice are paired in their order."""
    known = lexicon()
    pairs: dict[int, int] = {}
    for same in (_equal_here, _equal, _synonymous):
        for at, word in enumerate(one):
            if at not in pairs:
                free = (to for to, w in enumerate(other) if to not in pairs.values() and same(word, w))
                if (to := next(free, None)) is not None:
                    pairs[at] = to
    left = [at for at in range(len(one)) if at not in pairs]
    right = [to for to in range(len(other)) if to not in pairs.values()]
    opposed: list[tuple[str, str]] = []
    for at in tuple(left):
        to = next((to for to in right if known.opposite(one[at].stem, other[to].stem)), None)
        if to is not None:
            opposed.append((one[at].stem, other[to].stem))
            left.remove(at)
            right.remove(to)
    present = {word.stem for word in one}, {word.stem for word in other}
    swapped = _swapped(one, other, pairs)
    return Alignment(
        left=tuple(one[at].stem for at in left if one[at].stem not in present[1]),
        right=tuple(other[to].stem for to in right if other[to].stem not in present[0]),
        opposed=tuple(opposed),
        moved=tuple((one[at], other[to]) for at, to in pairs.items() if one[at].role != other[to].role),
        swapped=None if swapped is None else (one[swapped[0]].stem, one[swapped[1]].stem),
        neighbours=swapped is not None
        and swapped[1] - swapped[0] == 1 == abs(pairs[swapped[0]] - pairs[swapped[1]]),
    )


def _equal_here(one: Word, other: Word) -> bool:
    return one.stem == other.stem and one.role == other.role


def _equal(one: Word, other: Word) -> bool:
    return one.stem == other.stem


def _synonymous(one: Word, other: Word) -> bool:
    return lexicon().synonymous(one.stem, other.stem)


def _swapped(one: Sequence[Word], other: Sequence[Word], pairs: dict[int, int]) -> tuple[int, int] | None:
    """Words of the same part whose order is another; one that a preposition attaches may stand anywhere.

    Of several, two that do not stand side by side.
    """
    found = None
    order = sorted(pairs)
    for index, first in enumerate(order):
        for second in order[index + 1 :]:
            a, b, c, d = one[first], one[second], other[pairs[first]], other[pairs[second]]
            if pairs[first] > pairs[second] and a.role == c.role and b.role == d.role and a.role == b.role:
                found = first, second
                if second - first > 1 or pairs[first] - pairs[second] > 1:
                    return found
    return found
