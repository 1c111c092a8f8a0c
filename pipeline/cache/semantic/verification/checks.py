"""The checks by themselves: each holds two readings side by side and says what differs, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from pipeline.cache.semantic.verification.alignment import aligned
from pipeline.cache.semantic.verification.lexicon import lexicon
from pipeline.cache.semantic.verification.parsed_question import ARTICLES, Reading
from pipeline.cache.semantic.verification.stems import is_participle, stem

Check = Callable[[Reading, Reading], str | None]
_ASKED = frozenset(("what", "who", "whom", "which"))
_FUTURE = frozenset(("when", "how-long", "how-much"))  # "how long does it take" is about what will be
_POINTS = frozenset(("month", "weekday", "clock", "th"))  # what is no amount
_EXCHANGED = "order: the same words otherwise"
_ANOTHER_PART = "order: who is asked about"
_TORN = "order: within what is related"
SURE = frozenset((_EXCHANGED, _ANOTHER_PART, _TORN))  # that the answers differ, however much else is alike
# Around these, what stands on both sides may be turned around.
_EITHER_WAY = frozenset(
    ("and", "or", "vs", "versus", "with", "plus", "times", "a", "an", "the", "my", "your")
)
_CLAUSES = frozenset(
    ("but", "and", "or", "if", "because", "although", "while")
)  # "not" is part of one of them
_WHO = frozenset(("who", "whom"))
_DO = frozenset(("do", "does", "did"))
_WISHES = frozenset(("want", "need"))
_EXCHANGED_WORDS = 3  # of a part that has another's place, at most
_SAME_SENSE = ("more", "less", "most", "least")  # with an opposite beside them, they may say the same


def numbers(one: Reading, other: Reading) -> str | None:
    """Values, units, dates and clock times are the same, each with the same preposition."""
    if [n.value for n in one.numbers] != [n.value for n in other.numbers] or not _units_agree(one, other):
        return f"numbers: {_listed(map(str, one.numbers))} and {_listed(map(str, other.numbers))}"
    if sorted(_told(one)) != sorted(_told(other)) or _in_order(one) != _in_order(other):
        return "numbers have changed places"
    return None


def _units_agree(one: Reading, other: Reading) -> bool:
    """In "500 and 1000 rupees", the unit is that of both numbers."""
    for mine, yours in zip(one.numbers, other.numbers, strict=True):
        if mine.unit != yours.unit:
            listed = one if mine.unit == "" else other if yours.unit == "" else None
            unit = mine.unit or yours.unit
            if listed is None or unit in _POINTS or not any(n.unit == unit for n in listed.numbers):
                return False
    return True


def _in_order(reading: Reading) -> list[str]:
    """Without dates, which are written in either order; so are numbers that only "and" stands between."""
    told = zip(reading.runs, reading.counted, strict=True)
    values = [(run, number.value) for run, (_, number) in told if number.unit not in _POINTS]
    return [value for _, value in sorted(values)]


def _told(reading: Reading) -> list[tuple[str, str]]:
    known = lexicon()
    return [(role if role in known.roles else "", n.value) for role, n in reading.counted]


def names(one: Reading, other: Reading) -> str | None:
    """Whoever and whatever is named on one side is on the other."""
    known = lexicon()
    for here, there in ((one, other), (other, one)):
        stems = {stem(word) for word in there.said} if here.names else set()
        for name in sorted(here.names - stems):
            if not any(known.synonymous(name, other_stem) for other_stem in stems):
                return f"names: {name}"
    return None


def codes(one: Reading, other: Reading) -> str | None:
    """Identifiers, addresses, versions and the like are the same."""
    differing = one.codes ^ other.codes
    return f"codes: {_listed(differing)}" if differing else None


def quotes(one: Reading, other: Reading) -> str | None:
    """Quoted text is the same."""
    differing = one.quotes ^ other.quotes
    return f"quotations: {_listed(differing)}" if differing else None


def openings(one: Reading, other: Reading) -> str | None:
    """Both ask why, or when, or how."""
    if one.frames == other.frames:
        return None
    alike = lexicon().alike
    if one.to_me != other.to_me and "can-you" in one.frames | other.frames:
        return "openings: I and you"  # "can I call you", "can you call me"
    if len(one.frames) == len(other.frames) == 1 and any(
        one.frames | other.frames <= group for group in alike
    ):
        return None
    if one.frames ^ other.frames <= {"how-to", "way-to", "can-you"} and not (one.frames and other.frames):
        return None  # "how to reset a password" and "reset a password"
    return f"openings: {_listed(one.frames)} and {_listed(other.frames)}"


def pronouns(one: Reading, other: Reading) -> str | None:
    """Nobody becomes somebody else."""
    if one.owners and other.owners and one.owners != other.owners:
        return "pronouns: my and your"
    if one.persons and other.persons and set(one.persons) != set(other.persons):
        return "pronouns: I and you"
    if len(one.persons) == len(other.persons) and one.persons != other.persons:
        return "pronouns have changed places"
    if set(one.pronouns) != set(other.pronouns):
        return "pronouns"
    moved = len(one.pronouns) == len(other.pronouns) and one.pronouns != other.pronouns
    return "pronouns have changed places" if moved else None


def tenses(one: Reading, other: Reading) -> str | None:
    """Past, present and future are told apart."""
    differing = one.tenses ^ other.tenses
    if differing == {"future"} and one.frames == other.frames and one.frames & _FUTURE:
        return None
    if differing == {"past"} and _told_by_verb(*((other, one) if "past" in one.tenses else (one, other))):
        return None
    return f"tenses: {_listed(differing)}" if differing else None


def _told_by_verb(one: Reading, other: Reading) -> bool:
    """ "When she moved", "when did she move"."""
    bare = other.said - one.said
    return any(
        is_participle(word) and stem(word) in {stem(w) for w in bare} for word in one.said - other.said
    )


def joining(one: Reading, other: Reading) -> str | None:
    """ "And" is not "or"."""
    return "and, or" if one.joined and other.joined and one.joined != other.joined else None


def sense(one: Reading, other: Reading) -> str | None:
    """Negations and opposites: none, or two that cancel each other."""
    found = aligned(one, other)
    told, there = list(one.telling), list(other.telling)
    for word in one.telling:
        if word in there:
            told.remove(word)
            there.remove(word)
    known = lexicon()
    if told + there == ["than"] and one.chooses != other.chooses:
        told, there = [], []  # "is gold heavier than lead", "which is heavier, lead or gold"
    turned = abs(one.negations - other.negations) + len(found.opposed)
    for word in tuple(told):
        against = next((w for w in there if w in _SAME_SENSE and known.opposite(word, w)), None)
        if word in _SAME_SENSE and against is not None:
            told.remove(word)
            there.remove(against)
            turned += 1
    if told or there:
        return f"{_about(told + there)}: {_listed(told + there)}"
    if turned == 0 or (turned == 2 and len(found.opposed) == 1):
        return None
    return f"opposites: {_listed(f'{a}, {b}' for a, b in found.opposed)}" if found.opposed else "negation"


def _about(words: list[str]) -> str:
    return lexicon().telling.get(words[0], "words")


def words(one: Reading, other: Reading) -> str | None:
    """Every word that carries meaning is on both sides, or one that says the same."""
    found = aligned(one, other)
    if found.left or found.right:
        return f"words: {_listed(found.left)} and {_listed(found.right)}"
    if "why" in one.frames and (one.light ^ other.light) & _WISHES:
        return f"words: {_listed(one.light ^ other.light)}"  # why somebody wants something, or has it
    light, there = one.light - other.light, other.light - one.light
    return f"words: {_listed(light)} and {_listed(there)}" if light and there else None


def order(one: Reading, other: Reading) -> str | None:
    """Who does what to whom, from where to where."""
    found = aligned(one, other)
    if one.limited != other.limited and one.limited and other.limited:
        return f"places: only {_listed(one.limited)}, only {_listed(other.limited)}"
    if _another_part(one, other) or _another_part(other, one):
        return _ANOTHER_PART
    if _alternatives(one.sequence, other.sequence):
        return None
    joined = bool(one.joined & other.joined)
    equals = (one.symmetric and other.symmetric) or (joined and (found.swapped is None or found.neighbours))
    equals = equals or one.chooses != other.chooses
    traded = sorted(first.role for first, _ in found.moved) == sorted(
        second.role for _, second in found.moved
    )
    if not (equals and traded) and one.chooses == other.chooses:
        for first, second in found.moved:
            if "~" not in (first.role, second.role) and {first.role, second.role} != {"by", "with"}:
                return f"places: {first.role} {first.stem}, {second.role} {second.stem}"
    attached = {(first.role, second.role) for first, second in found.moved}
    traded_with = any((there, here) in attached for here, there in attached)
    if traded_with and not equals:
        return f"places: {_listed(first.stem for first, _ in found.moved)}"
    if one.symmetric and other.symmetric and not _stay_together(one, other):
        return _TORN
    if _facing(one) != _facing(other) and not equals:
        return f"order: {_listed(_facing(one))}"
    if found.swapped is not None and not equals and not _only_one_way(one, other):
        both = "and" in one.joined | other.joined and found.neighbours
        return None if both else f"order: {found.swapped[0]}, {found.swapped[1]}"
    between = _exchanged(one.sequence, other.sequence)
    if between is None or any(stem(word) in lexicon().symmetric for word in between):
        return None
    return None if one.symmetric and other.symmetric and "and" in between else _EXCHANGED


def _exchanged(one: Sequence[str], other: Sequence[str]) -> Sequence[str] | None:
    """The same words, but two parts have changed places, or "not" or "somebody's" has: what is between them."""
    if one == other or sorted(one) != sorted(other):
        return None
    negations = lexicon().negations
    if _without(one, negations) == _without(other, negations):
        return None if _CLAUSES.isdisjoint(one) and _denied(one) == _denied(other) else ()
    owners = {word for word in one if word.endswith("'s")}
    if _without(one, owners) == _without(other, owners):
        return ()
    here, there = _differing(one, other)
    size = len(here)
    for left in range(1, min(size, 1 + _EXCHANGED_WORDS)):
        for right in range(1, min(size - left, 1 + _EXCHANGED_WORDS)):
            between = here[left : size - right]
            parts_fit = here[:left] == there[size - left :] and here[size - right :] == there[:right]
            if parts_fit and between == there[right : size - left] and not _EITHER_WAY.issuperset(between):
                return between
    return None


def _another_part(one: Reading, other: Reading) -> bool:
    """ "Who did Peter help", "who helped Peter"; "what does it cause", "what causes it"."""
    here, there = _without(one.sequence, _DO), _without(other.sequence, _DO)
    if there[:1] == ["why"] and "causes" in other.said and here[:1] == ["what"]:
        return stem(here[-1]) == stem("causes")
    at = next((at for at, word in enumerate(here[:-2]) if word in _WHO), None)
    to = next((to for to, word in enumerate(there[:-2]) if word in _WHO), None)
    if at is None or to is None or stem(here[at + 1]) not in one.names:
        return False
    name, verb = stem(here[at + 1]), stem(there[to + 1])
    return verb in map(stem, here[at + 2 :]) and name in map(stem, there[to + 2 :])


def _alternatives(one: Sequence[str], other: Sequence[str]) -> bool:
    """ "with a bank card or a passport", "with a passport or a bank card"."""
    one, other = _without(one, ARTICLES), _without(other, ARTICLES)
    if one == other or one.count("or") != 1 or sorted(one) != sorted(other):
        return False
    here, there = _differing(one, other)
    at = here.index("or") if "or" in here else 0
    return 0 < at < len(here) - 1 and [*here[at + 1 :], "or", *here[:at]] == list(there)


def _differing(one: Sequence[str], other: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What is left of two that are not equal when what they begin and end with is taken away."""
    start = next(at for at, (here, there) in enumerate(zip(one, other, strict=True)) if here != there)
    end = next(
        at for at, (here, there) in enumerate(zip(one[::-1], other[::-1], strict=True)) if here != there
    )
    return one[start : len(one) - end], other[start : len(other) - end]


def _denied(words: Sequence[str]) -> bool:
    """Whether it is what follows "to" that is denied: "not to go", "to not go"."""
    return any({here, there} == {"not", "to"} for here, there in pairwise(words))


def _stay_together(one: Reading, other: Reading) -> bool:
    """What stands before a relation that holds both ways is turned around as a whole, or not at all."""
    known = lexicon().symmetric
    sides = []
    for reading in (one, other):
        stems = [word.stem for word in reading.words]
        at = next((at for at, form in enumerate(stems) if form in known), 0)
        sides.append((frozenset(stems[:at]), frozenset(stems[at + 1 :])))
    (before, after), (before_there, after_there) = sides
    if not (before and after and before_there and after_there):
        return True
    if before | after != before_there | after_there:
        return True
    return before == before_there or before.isdisjoint(before_there)


def _without(words: Sequence[str], left_out: Collection[str]) -> list[str]:
    return [word for word in words if word not in left_out]


def _facing(reading: Reading) -> list[str]:
    """Opposites that are both in one question, in their order: "is the left one bigger than the right one"."""
    opposites = lexicon().opposites
    return [word for word in reading.telling if any(w in reading.telling for w in opposites.get(word, ()))]


def _only_one_way(one: Reading, other: Reading) -> bool:
    """Two words without names, a verb and what it is about: "reset the password", "password reset"."""
    if len(one.words) != 2 or len(other.words) != 2 or one.to_me != other.to_me:
        return False
    if not _ASKED.isdisjoint(one.said) or not _ASKED.isdisjoint(other.said):
        return False  # "what eats frogs", "what do frogs eat"
    if one.negations or "but" in one.telling or one.names or other.names:
        return False
    return not (one.pronouns or other.pronouns or one.numbers)


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "numbers": numbers,
        "codes": codes,
        "quotes": quotes,
        "names": names,
        "openings": openings,
        "pronouns": pronouns,
        "tenses": tenses,
        "joining": joining,
        "sense": sense,
        "words": words,
        "order": order,
    }
)


def _listed(words: object) -> str:
    return ", ".join(sorted(map(str, words))) or "none"  # type: ignore[call-overload]
