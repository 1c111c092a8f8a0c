"""Guards: what two questions may not differ in if one answer is to serve both, however near they are.

A guard forbids where both questions say something and not the same. What only one of them says may be another wording;
that is left to the score. Each has a name, which a recipe may leave out of `cache.semantic.guards`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from pipeline.cache.semantic.words import FUNCTION_WORDS, JOINING, Number, QuestionWords, read

Guard = Callable[[QuestionWords, QuestionWords], str | None]
_EXCHANGED_WORDS = 3  # of a part that has another's place, at most


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
    here, there = set(one.content), set(other.content)
    much = len(here & there) >= len(here ^ there)
    return "negation" if much and one.negations % 2 != other.negations % 2 else None


def grammar(one: QuestionWords, other: QuestionWords) -> str | None:
    """The same content words, but before and after, and and or, is and was, his and her, why and when."""
    if set(one.content) != set(other.content):
        return None
    if ("gender" in one.grammar) != ("gender" in other.grammar):
        # "his family" beside "Anna's family"
        return "grammar: who is meant"
    for kind in sorted(one.grammar.keys() & other.grammar.keys()):
        if one.grammar[kind].isdisjoint(other.grammar[kind]):
            return _both(one.grammar[kind], other.grammar[kind], "grammar")
    return None


def order(one: QuestionWords, other: QuestionWords) -> str | None:
    """The same content words, of which two have changed places: who does what to whom, from where to where."""
    if sorted(one.content) != sorted(other.content):
        return None
    if one.passive != other.passive:
        # "Did Anna call Tom", "was Anna called by Tom"
        return "order: the passive voice" if one.content == other.content else None
    if (told := _roles(one) ^ _roles(other)) and (one.content != other.content or ("not", "to") in told):
        return f"order: {_listed(map(' '.join, told))}"
    shared = Counter(one.sequence) & Counter(other.sequence)
    found = _exchanged(_only(one.sequence, shared), _only(other.sequence, shared))
    return f"order: {_listed(found)}" if found else None


GUARDS: Mapping[str, Guard] = MappingProxyType(
    {"numbers": numbers, "names": names, "negation": negation, "grammar": grammar, "order": order}
)


def _roles(one: QuestionWords) -> set[tuple[str, ...]]:
    """Who owns, what is denied, and whether it is asked who does it: "what causes it", not "what does it cause"."""
    found: set[tuple[str, ...]] = {(word,) for word in one.words if word.endswith("'s")}
    found |= {("not", "to")} & {*pairwise(one.words)}
    asks = one.words[:1] in (("what",), ("who",)) and not FUNCTION_WORDS.issuperset(one.words[1:2])
    return found | ({one.words[:2]} if asks else set())


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


def _only(words: Sequence[str], shared: Counter[str]) -> list[str]:
    """Those that both have, as often as both have them; of more, the last ones: "how to turn A to B"."""
    left = Counter(shared)
    found = []
    for word in reversed(words):
        if left[word]:
            left[word] -= 1
            found.append(word)
    return found[::-1]


def _exchanged(one: Sequence[str], other: Sequence[str]) -> tuple[str, str] | None:
    """Two parts of the same words that have changed places around something, such as "from A to B", "from B to A"."""
    if one == other:
        return None
    apart = [at for at, (here, there) in enumerate(zip(one, other, strict=True)) if here != there]
    here, there = one[apart[0] : apart[-1] + 1], other[apart[0] : apart[-1] + 1]
    size = len(here)
    for left in range(1, min(size, 1 + _EXCHANGED_WORDS)):
        for right in range(1, min(size - left, 1 + _EXCHANGED_WORDS)):
            between = here[left : size - right]
            parts_fit = here[:left] == there[size - left :] and here[size - right :] == there[:right]
            if parts_fit and between == there[right : size - left] and not JOINING.issuperset(between):
                return " ".join(here[:left]), " ".join(here[size - right :])
    return None


def _both(here: Iterable[object], there: Iterable[object], guard: str) -> str | None:
    here, there = _listed(here), _listed(there)
    return f"{guard}: {here} and {there}" if here and there else None


def _listed(words: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, words)))
