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
_DENYING = ("un", "in", "im", "il", "ir", "dis", "non", "mis")
_LEAST_STEM = 3  # letters of a word that a prefix may deny


def findings(question: str, candidate: str) -> Mapping[str, str]:
    """What each guard finds: its name, and such as "numbers: 3 and 4". The order of the two questions does not matter.

    >>> dict(findings("Does it weigh 5 kg?", "Does it weigh 5 lb?"))
    {'numbers': 'numbers: 5000 g and 5 pound'}
    """
    one, other = (read(text) for text in sorted((question, candidate)))
    return {name: found for name, guard in GUARDS.items() if (found := guard(one, other)) is not None}


def numbers(one: QuestionWords, other: QuestionWords) -> str | None:
    """Numbers with their units, dates and clock times: both have some that the other does not have."""
    here, there = unshared_numbers(one, other)
    return f"numbers: {_listed(map(str, here))} and {_listed(map(str, there))}" if here and there else None


def codes(one: QuestionWords, other: QuestionWords) -> str | None:
    """Identifiers, versions, addresses, options of a command; "6s" beside "7" is one, too."""
    here, there = one.codes - other.said, other.codes - one.said
    left = unshared_numbers(one, other)
    either = (here or left[0]) and (there or left[1]) and (here or there)
    return f"codes: {_listed([*here, *there])}" if either else None


def quotations(one: QuestionWords, other: QuestionWords) -> str | None:
    """What stands in quotation marks or backticks."""
    differing = one.quotations ^ other.quotations
    return f"quotations: {_listed(differing)}" if differing and one.quotations and other.quotations else None


def names(one: QuestionWords, other: QuestionWords) -> str | None:
    """English names: both have one that the other does not say."""
    here, there = unshared_names(one, other)
    return f"names: {_listed(here)} and {_listed(there)}" if here and there else None


def negation(one: QuestionWords, other: QuestionWords) -> str | None:
    """Of much the same words, one is denied; or one has a word that the other has with "un", "dis" or "less"."""
    here, there = set(one.content) - set(other.content), set(other.content) - set(one.content)
    much = len(set(one.content) & set(other.content)) >= len(here) + len(there)
    if much and one.negations % 2 != other.negations % 2:
        return "negation"
    denied = next(((a, b) for a in here for b in there if _denies(a, b) or _denies(b, a)), None)
    return f"negation: {_listed(denied)}" if denied else None


def grammar(one: QuestionWords, other: QuestionWords) -> str | None:
    """The same content words, but before and after, and and or, is and was, he and she, more and less."""
    if set(one.content) != set(other.content):
        return None
    kind = next(iter(_conflicts(one, other)), None)
    if kind is not None:
        return f"grammar: {_listed(one.grammar[kind])} and {_listed(other.grammar[kind])}"
    if ("gender" in one.grammar) != ("gender" in other.grammar):
        # "his family" beside "Anna's family"
        return "grammar: who is meant"
    if one.opening and other.opening and one.opening != other.opening:
        return f"grammar: {one.opening} and {other.opening}"
    return None


def order(one: QuestionWords, other: QuestionWords) -> str | None:
    """The same content words, of which two have changed places: who does what to whom, from where to where."""
    if sorted(one.content) != sorted(other.content):
        return None
    if one.passive != other.passive:
        # "Did Anna call Tom", "was Anna called by Tom"
        return "order: the passive voice" if one.content == other.content else None
    if _owners(one) != _owners(other) and _owners(one) and _owners(other):
        return f"order: {_listed(_owners(one) | _owners(other))}"
    if ("not", "to") in {*pairwise(one.words)} ^ {*pairwise(other.words)}:
        return "order: what is denied"
    if _asks_for_subject(one) != _asks_for_subject(other) and one.content != other.content:
        # "what causes it", "what does it cause"
        return "order: who is asked for"
    shared = Counter(one.sequence) & Counter(other.sequence)
    found = _exchanged(_only(one.sequence, shared), _only(other.sequence, shared))
    return f"order: {_listed(found)}" if found else None


GUARDS: Mapping[str, Guard] = MappingProxyType(
    {
        "numbers": numbers,
        "codes": codes,
        "quotations": quotations,
        "names": names,
        "negation": negation,
        "grammar": grammar,
        "order": order,
    }
)


def unshared_numbers(one: QuestionWords, other: QuestionWords) -> tuple[list[Number], list[Number]]:
    """The numbers that only the one has, and only the other; one without a unit may be one with."""
    here, there = list(one.numbers), list(other.numbers)
    for same in (_equal, _equal_value):
        for number in tuple(here):
            match = next((beside for beside in there if same(number, beside)), None)
            if match is not None:
                here.remove(number)
                there.remove(match)
    return here, there


def unshared_names(one: QuestionWords, other: QuestionWords) -> tuple[frozenset[str], frozenset[str]]:
    """The names that only the one says, and only the other."""
    return one.names - other.said, other.names - one.said


def _conflicts(one: QuestionWords, other: QuestionWords) -> list[str]:
    """What the function words of both are about and say differently: of time, tense, quantity and so on."""
    both = one.grammar.keys() & other.grammar.keys()
    return [kind for kind in sorted(both) if one.grammar[kind].isdisjoint(other.grammar[kind])]


def _owners(one: QuestionWords) -> set[str]:
    return {word for word in one.words if word.endswith("'s")}


def _asks_for_subject(one: QuestionWords) -> bool:
    return one.words[:1] in (("what",), ("who",)) and not FUNCTION_WORDS.issuperset(one.words[1:2])


def _equal(one: Number, other: Number) -> bool:
    return one == other


def _equal_value(one: Number, other: Number) -> bool:
    return one.value == other.value and "" in (one.unit, other.unit)


def _denies(one: str, other: str) -> bool:
    """Of two stems: "legal" and "illegal", "harmful" and "harmless"."""
    if one.endswith("ful") and other == f"{one[:-3]}less":
        return True
    return len(one) >= _LEAST_STEM and other.endswith(one) and other[: -len(one)] in _DENYING


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


def _listed(words: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, words)))
