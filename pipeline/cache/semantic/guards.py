"""Guards: what two questions may not differ in if one answer is to serve both, however near they are.

A guard forbids where both questions say something and not the same. What only one of them says may be another wording;
that is left to the score. Each has a name, which a recipe may leave out of `cache.semantic.guards`.

`read` takes a question apart for them: words, numbers with units and dates, codes, names. The only words that are
listed (data/words.yaml) are English function words, numerals, units, months and days of the week, and words that deny
in English, German, French and Spanish. The rest is read in any language.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.resources import files
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple
from unicodedata import combining, normalize

import yaml

# Questions that are kept, about 5 KB each.
_KEPT = 4096
_TOKEN = re.compile(
    r"""https?://[^\s"'<>]+ | www\.[^\s"'<>]+ | (?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.]*\w
    | (?<!\S)--?[a-zA-Z][\w-]* | \d+(?:[.,:/\-]\d+)*\w* | \.?[^\W\d_]\w*(?:['.\-]\w+)*(?:\+\+|\#)? | _\w+
    | (?<=\d\s)-(?=\s\d) | [^\s\w.,;:!?'"`()\[\]{}/\\|…¿¡«»„\-]""",
    re.VERBOSE,
)
_PLAIN = str.maketrans({"’": "'", "‘": "'", "–": "-", "—": " ", "\u00a0": " "})
_CODE = re.compile(r"[^\W\d]*\d.*[^\W\d]|[^\W\d]+\d.*|.*[_@#/\\].*|.*\+\+|--?\w.*|\.\w+|[\w-]+\.[a-z]{1,4}")
_NUMBER = re.compile(r"(\d+(?:[.,:/\-]\d+)*)([^\W\d_]*)")
_GROUPED = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")

# BaseLoader: every value stays text ("on" and "no" are words here).
_DATA: Mapping[str, Any] = yaml.load(
    (files(__package__) / "data" / "words.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader
)
_WRITTEN_OUT = tuple(
    (re.compile(pattern, re.IGNORECASE), full) for pattern, full in _DATA["contractions"].items()
)
FUNCTION_WORDS = frozenset(_DATA["function_words"])
_NEGATIONS, _HELPING = frozenset(_DATA["negations"]), frozenset(_DATA["helping"])
_SMALL = {word: value for value, word in enumerate(_DATA["numerals"])}
_SMALL |= {word: 10 * tens for tens, word in enumerate(_DATA["tens"], 2)}
_ORDINALS = {word: value for value, word in enumerate(_DATA["ordinals"], 1)}
_POWERS = {word: float(value) for word, value in _DATA["powers"].items()}
_UNITS: Mapping[str, tuple[str, float]] = {  # as written: measure, and how much of it
    form: (measure, float(size))
    for measure, sizes in _DATA["units"].items()
    for size, forms in sizes.items()
    for form in forms
}
_CALENDAR = {
    form: (kind, number)
    for kind in ("month", "weekday")
    for number, name in enumerate(_DATA[f"{kind}s"], 1)
    for form in (name, name[:3] if kind == "month" else f"{name}s")
}
_SIGNS = frozenset("$€£¥₹")
_ORDINAL_ENDINGS = frozenset(("st", "nd", "rd", "th"))
_AFTER_DIGITS = frozenset({*_UNITS, *_POWERS, *_ORDINAL_ENDINGS, "am", "pm"})
# "6s" and "5g" are mostly no seconds and no grams.
_ONTO_DIGITS = frozenset({"", "k", *(form for form in _AFTER_DIGITS if len(form) > 1)})


class Number(NamedTuple):
    """A value and what it counts: a unit, "th" of an ordinal, "am" and "pm", "date", or "" for nothing."""

    value: str  # canonical: 1000 for 1,000 and "one thousand"
    unit: str

    def __str__(self) -> str:
        return f"{self.value} {self.unit}".rstrip()


class Token(NamedTuple):
    """A word, a number or a sign, as it is written."""

    raw: str
    lower: str
    opens: bool  # it begins a sentence, and has its capital for no other reason


@dataclass(frozen=True, slots=True, eq=False)
class QuestionWords:
    """A question. Compared by identity: a text is read once."""

    words: tuple[str, ...]  # in lower case, in their order
    content: frozenset[str]  # stems of what is no function word and no number
    vocabulary: frozenset[str]  # every word in lower case, and its stem
    numbers: tuple[Number, ...]
    codes: frozenset[str]  # identifiers, versions, addresses, options
    names: frozenset[str]  # in lower case: what is capitalised within a sentence, as German nouns are, too
    negations: int


@lru_cache(_KEPT)
def read(text: str) -> QuestionWords:
    """Take a question apart."""
    flat = text.translate(_PLAIN)
    for pattern, full in _WRITTEN_OUT:
        flat = pattern.sub(full, flat)
    tokens = list(_tokens(flat))
    lower = [token.lower for token in tokens]
    numbers: list[Number] = []
    content: set[str] = set()
    codes: set[str] = set()
    at = 0
    while at < len(tokens):
        word = lower[at]
        counted = _number_at(tokens, at)
        if counted is not None:
            number, length = counted
            numbers.append(number)
            at += length
            continue
        if _CODE.fullmatch(tokens[at].raw):
            codes.add(word)
        if word not in FUNCTION_WORDS:
            content.add(stem(word))
        at += 1
    return QuestionWords(
        words=tuple(lower),
        content=frozenset(content),
        vocabulary=frozenset(lower) | frozenset(map(stem, lower)),
        numbers=tuple(numbers),
        codes=frozenset(codes),
        names=_names(tokens),
        negations=_negations(lower),
    )


@lru_cache(8192)
def stem(word: str) -> str:
    """Put the forms of an English word as one. Not linguistics: equal words stay equal.

    >>> [stem(word) for word in ("cards", "delivery", "deliveries", "stopped", "stopping", "charges", "charging")]
    ['card', 'delivery', 'delivery', 'stop', 'stop', 'charg', 'charg']
    """
    word = word.removesuffix("'s").removesuffix("'")
    if len(word) <= 3 or not word.isalpha():
        return word
    if len(word) > 4 and word.endswith(("ies", "ied")):
        return f"{word[:-3]}y"
    if word.endswith(("sses", "shes", "ches", "xes", "zzes")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        cut = word.removesuffix(ending)
        if cut != word and len(cut) > 2 and not word.endswith("eed") and any(c in "aeiouy" for c in cut):
            doubled = len(cut) > 3 and cut[-1] == cut[-2] and cut[-1] not in "aeiouflsz"
            return cut[:-1] if doubled else cut.removesuffix("e")
    return word.removesuffix("e") if len(word) > 3 else word


def _tokens(text: str) -> Iterator[Token]:
    """Words in their order; what a hyphen or a full stop joins is several, unless it is a code."""
    end = 0
    for match in _TOKEN.finditer(text):
        raw = match[0]
        opens = end == 0 or any(mark in '.?!:;\n"“(' for mark in text[end : match.start()])
        end = match.end()
        whole = len(raw) == 1 or raw[0].isdigit() or _CODE.fullmatch(raw) is not None
        parts = [raw] if whole else re.split(r"[.\-]", raw)
        for index, part in enumerate(parts):
            if part:
                yield Token(part, "and" if part == "&" else part.lower(), opens and index == 0)


def _number_at(tokens: Sequence[Token], at: int) -> tuple[Number, int] | None:
    """Return the number that begins at a token, and how many tokens it takes."""
    if (date := _date(tokens, at)) is not None:
        return date, 1
    signed = tokens[at].lower in _SIGNS
    counted = _value(tokens, at + signed) if at + signed < len(tokens) else None
    if counted is None:
        return None
    value, tail, end = counted
    if signed:
        return Number(value, _UNITS[tokens[at].lower][0]), end - at
    if not tail and end < len(tokens) and tokens[end].lower in _AFTER_DIGITS:
        tail, end = tokens[end].lower, end + 1
    if tail in ("am", "pm"):
        return Number(value, tail), end - at
    measure, size = ("th", 1.0) if tail in _ORDINAL_ENDINGS else _UNITS.get(tail, ("", 1.0))
    return Number(_scaled(value, size), measure), end - at


def _value(tokens: Sequence[Token], at: int) -> tuple[str, str, int] | None:
    """A number, the unit that is written onto its digits, and where it ends; None if none begins here."""
    word, end, tail = tokens[at].lower, at + 1, ""
    following = tokens[end].lower if end < len(tokens) else ""
    if word[0].isdecimal():
        match = _NUMBER.fullmatch(word)
        if match is None or (tail := match[2]) not in _ONTO_DIGITS:
            return None
        value = match[1].replace(",", "") if _GROUPED.fullmatch(match[1]) else match[1]
    elif word in _SMALL and (word != "one" or following in _UNITS or following in _POWERS):
        value = str(_SMALL[word])
        if _SMALL[word] >= 20 and 0 < _SMALL.get(following, 0) < 10:
            value, end = str(_SMALL[word] + _SMALL[following]), end + 1
    elif word in _ORDINALS:
        return str(_ORDINALS[word]), "th", end
    else:
        return None
    if tail in _POWERS:
        value, tail = _scaled(value, _POWERS[tail]), ""
    while not tail and end < len(tokens) and tokens[end].lower in _POWERS:
        value, end = _scaled(value, _POWERS[tokens[end].lower]), end + 1
    return _scaled(value, 1), tail, end


def _scaled(value: str, size: float) -> str:
    """Times a size; what is no single number, such as 24/7 or a date, stays as it is."""
    try:
        return f"{float(value) * size:.12g}"
    except ValueError:
        return value


def _date(tokens: Sequence[Token], at: int) -> Number | None:
    """A month or a day of the week; "may", "mar" and the like only beside a number."""
    raw, word, opens = tokens[at]
    if word not in _CALENDAR:
        return None
    kind, number = _CALENDAR[word]
    by_number = any(0 <= i < len(tokens) and tokens[i].raw[0].isdecimal() for i in (at - 1, at + 1))
    whole = len(word) > 3 and word not in ("march", "august")
    if kind == "weekday" or by_number or whole or (len(word) > 3 and raw[0].isupper() and not opens):
        return Number(f"{kind} {number}", "date")
    return None


def _names(tokens: Sequence[Token]) -> frozenset[str]:
    """Return words that are capitalised within a sentence, or have capitals within; none of titles and shouting."""
    words = [token for token in tokens if token.raw[0].isalpha()]
    lowered = any(token.raw[0].islower() and token.lower not in FUNCTION_WORDS for token in words)
    shouting = sum(token.raw.isupper() for token in words) > len(words) / 2
    return frozenset(
        stem(token.lower)
        for token in words
        if not shouting
        and token.lower not in FUNCTION_WORDS
        and token.lower not in _CALENDAR
        and (
            any(letter.isupper() for letter in token.raw[1:])
            or (token.raw[0].isupper() and not token.opens and (lowered or len(words) < 5))
        )
    )


def _negations(words: Sequence[str]) -> int:
    """How often it is denied; not by "isn't it …?" and "… or not?", which ask the same as without."""
    count = sum(word in _NEGATIONS for word in words)
    asks = len(words) > 1 and words[0] in _HELPING and words[1] == "not"
    return count - asks - sum(pair == ("or", "not") for pair in pairwise(words))


Guard = Callable[[QuestionWords, QuestionWords], str | None]


def findings(question: str, candidate: str) -> Mapping[str, str]:
    """Return the findings by guard, such as "numbers: 3 and 4". The order of the two questions does not matter.

    >>> dict(findings("Does it weigh 5 kg?", "Does it weigh 5 lb?"))
    {'numbers': 'numbers: 5000 g and 5 pound'}
    """
    first, second = (read(text) for text in sorted((question, candidate)))
    return {name: finding for name, guard in GUARDS.items() if (finding := guard(first, second)) is not None}


def numbers(first: QuestionWords, second: QuestionWords) -> str | None:
    """Numbers with their units, dates and times; identifiers, versions, addresses, options of a command."""
    first_only, second_only = _unshared_numbers(first, second)
    return _both(
        [*first_only, *(first.codes - second.vocabulary)],
        [*second_only, *(second.codes - first.vocabulary)],
        "numbers",
    )


def names(first: QuestionWords, second: QuestionWords) -> str | None:
    """Names, by their capitals."""
    return _both(first.names - second.vocabulary, second.names - first.vocabulary, "names")


def negation(first: QuestionWords, second: QuestionWords) -> str | None:
    """Questions of much the same words, of which one is denied."""
    much = len(first.content & second.content) >= len(first.content ^ second.content)
    return "negation" if much and first.negations % 2 != second.negations % 2 else None


def accents(first: QuestionWords, second: QuestionWords) -> str | None:
    """A word has other accents in the one than in the other: "schon", "schön"."""
    first_accents, second_accents = _by_bare_form(first), _by_bare_form(second)
    differing = [
        bare
        for bare in first_accents.keys() & second_accents.keys()
        if first_accents[bare] != second_accents[bare]
    ]
    return _both(
        (word for bare in differing for word in first_accents[bare]),
        (word for bare in differing for word in second_accents[bare]),
        "accents",
    )


GUARDS: Mapping[str, Guard] = MappingProxyType(
    {"numbers": numbers, "names": names, "negation": negation, "accents": accents}
)


def _by_bare_form(question: QuestionWords) -> dict[str, set[str]]:
    """Map words without their accents, as an encoder that drops them sees them, to the words."""
    forms: dict[str, set[str]] = {}
    for word in map(partial(normalize, "NFC"), question.words):
        bare = "".join(letter for letter in normalize("NFD", word) if not combining(letter))
        forms.setdefault(bare, set()).add(word)
    return forms


def _unshared_numbers(first: QuestionWords, second: QuestionWords) -> tuple[list[Number], list[Number]]:
    """Return the numbers that only one of both has; one without a unit may be one with."""
    first_only, second_only = list(first.numbers), list(second.numbers)
    for number in first.numbers:
        # An equal one first.
        for beside in sorted(second_only, key=number.__ne__):
            if number.value == beside.value and ("" in (number.unit, beside.unit) or number == beside):
                first_only.remove(number)
                second_only.remove(beside)
                break
    return first_only, second_only


def _both(first_items: Iterable[object], second_items: Iterable[object], guard: str) -> str | None:
    first_items, second_items = _listed(first_items), _listed(second_items)
    return f"{guard}: {first_items} and {second_items}" if first_items and second_items else None


def _listed(items: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, items)))
