"""Guards: what two questions may not differ in if one answer is to serve both, however near they are.

A guard forbids where both questions say something and not the same. What only one of them says may be another wording;
that is left to the score. Each has a name, which a recipe may leave out of `cache.semantic.guards`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from unicodedata import combining, normalize

from pipeline.cache.semantic.words import Number, QuestionWords, read

Guard = Callable[[QuestionWords, QuestionWords], str | None]


def findings(question: str, candidate: str) -> Mapping[str, str]:
    """What each guard finds: its name, and such as "numbers: 3 and 4". The order of the two questions does not matter.

    >>> dict(findings("Does it weigh 5 kg?", "Does it weigh 5 lb?"))
    {'numbers': 'numbers: 5000 g and 5 pound'}
    """
    one, other = (read(text) for text in sorted((question, candidate)))
    return {name: found for name, guard in GUARDS.items() if (found := guard(one, other)) is not None}


def numbers(one: QuestionWords, other: QuestionWords) -> str | None:
    """Numbers with their units, dates and times; identifiers, versions, addresses, options of a command."""
    here, there = _unshared_numbers(one, other)
    return _both([*here, *(one.codes - other.said)], [*there, *(other.codes - one.said)], "numbers")


def names(one: QuestionWords, other: QuestionWords) -> str | None:
    """Names, by their capitals."""
    return _both(one.names - other.said, other.names - one.said, "names")


def negation(one: QuestionWords, other: QuestionWords) -> str | None:
    """Of much the same words, one is denied."""
    much = len(one.content & other.content) >= len(one.content ^ other.content)
    return "negation" if much and one.negations % 2 != other.negations % 2 else None


def accents(one: QuestionWords, other: QuestionWords) -> str | None:
    """A word has other accents in the one than in the other: "schon", "schön"."""
    here, there = _by_bare_form(one), _by_bare_form(other)
    differing = [bare for bare in here.keys() & there.keys() if here[bare] != there[bare]]
    return _both(
        (word for bare in differing for word in here[bare]),
        (word for bare in differing for word in there[bare]),
        "accents",
    )


GUARDS: Mapping[str, Guard] = MappingProxyType(
    {"numbers": numbers, "names": names, "negation": negation, "accents": accents}
)


def _by_bare_form(question: QuestionWords) -> dict[str, set[str]]:
    """Its words by what an encoder that drops accents sees of them."""
    found: dict[str, set[str]] = {}
    for word in map(partial(normalize, "NFC"), question.words):
        bare = "".join(letter for letter in normalize("NFD", word) if not combining(letter))
        found.setdefault(bare, set()).add(word)
    return found


def _unshared_numbers(one: QuestionWords, other: QuestionWords) -> tuple[list[Number], list[Number]]:
    """The numbers that only the one has, and only the other; one without a unit may be one with."""
    here, there = list(one.numbers), list(other.numbers)
    for number in one.numbers:
        # An equal one first.
        for beside in sorted(there, key=number.__ne__):
            if number.value == beside.value and ("" in (number.unit, beside.unit) or number == beside):
                here.remove(number)
                there.remove(beside)
                break
    return here, there


def _both(here: Iterable[object], there: Iterable[object], guard: str) -> str | None:
    here, there = _listed(here), _listed(there)
    return f"{guard}: {here} and {there}" if here and there else None


def _listed(words: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, words)))
