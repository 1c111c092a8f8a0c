"""Numbers of a text with their units: digits or words, money, clock times, months and days of the week."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from pipeline.cache.semantic.verification.lexicon import Lexicon, lexicon
from pipeline.cache.semantic.verification.tokens import Token

_UNITS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
_TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL = {word: value for value, word in enumerate((*_UNITS, *_TEENS))} | {"dozen": 12}
_SMALL |= {word: 10 * tens for tens, word in enumerate(_TENS, 2)}
_ORDINAL_WORDS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
)
_ORDINALS = {word: value for value, word in enumerate((*_ORDINAL_WORDS, "eleventh", "twelfth"), 1)}
_POWERS = {
    "hundred": 100,
    "thousand": 1000,
    "k": 1000,
    "million": 10**6,
    "billion": 10**9,
    "lakh": 10**5,
    "crore": 10**7,
}
_TIMES = {"once": 1, "twice": 2, "thrice": 3}
_SIGNS = frozenset("$€£¥₹")
_HALF = 0.5
# What can be said in several units, in the smallest of them.
_SIZES = {
    "s": ("s", 1.0), "min": ("s", 60.0), "h": ("s", 3600.0), "day": ("s", 86400.0),
    "week": ("s", 604800.0), "mg": ("mg", 1.0), "g": ("mg", 1e3), "kg": ("mg", 1e6), "mm": ("mm", 1.0),
    "cm": ("mm", 10.0), "m": ("mm", 1e3), "km": ("mm", 1e6), "ml": ("ml", 1.0), "l": ("ml", 1e3),
}  # fmt: skip
_SPANS = frozenset(("s", "min", "h", "week", "month", "year"))
_WITHIN = frozenset(("in", "within", "after", "for"))
_COUNTING = frozenset(("many", "much", "often", "how-many", "how-much", "how-often", "times"))


@dataclass(frozen=True, slots=True)
class Number:
    """A value and what it counts: a unit, "th" of an ordinal, "clock" in minutes, "month", "weekday", or nothing."""

    value: str  # canonical: 1000 for 1,000 and "one thousand"
    unit: str
    written: str = field(default="", compare=False)  # if that is in another unit

    def __str__(self) -> str:
        return self.written or f"{self.value} {self.unit}".rstrip()


@cache
def number_words() -> frozenset[str]:
    """What a number may begin with, if not with a digit."""
    known = lexicon()
    days = {f"{day}s" for day in known.weekdays}
    return frozenset(
        {*_SMALL, *_ORDINALS, *_TIMES, *_SIGNS, *known.months, *known.weekdays, *days, "half", "a", "an"}
    )


def number_at(given: Sequence[Token], at: int, lexicon: Lexicon) -> tuple[Number, int] | None:
    """The number that begins at a token, and how many tokens it takes."""
    word = given[at].text
    if (named := _named(given, at, lexicon)) is not None:
        return named, 1
    if word in ("a", "an") and (span := _one_span(given, at, lexicon)) is not None:
        return span, 2
    if word in _TIMES:
        return Number(str(_TIMES[word]), "times"), 1
    sign = lexicon.units[word] if word in _SIGNS else ""
    start = at + bool(sign)
    if (counted := _counted(given, start)) is None:
        return None
    value, taken, ordinal = counted
    following = given[start + taken].text if start + taken < len(given) else ""
    if sign:
        return Number(value, sign), taken + 1
    if following in ("am", "pm", "a.m", "p.m") or (":" in value):
        return _clock(value, following)
    if following == "°" and start + taken + 1 < len(given):
        taken, following = taken + 1, "°" + given[start + taken + 1].text
    if following in ("st", "nd", "rd", "th"):
        return Number(value, "" if _near_month(given, start, taken + 1, lexicon) else "th"), taken + 1
    if ordinal:
        return Number(value, "" if _near_month(given, start, taken, lexicon) else "th"), taken
    if following in ("a", "an") and word == "half" and start + 2 < len(given):  # "half an hour"
        taken, following = taken + 1, given[start + 2].text
    if following in lexicon.units:
        return _measured(value, lexicon.units[following]), taken + 1
    if word == "one":  # "the blue one", "which one": a pronoun
        return None
    return Number(value, ""), taken


def _measured(value: str, unit: str) -> Number:
    smallest, size = _SIZES.get(unit, (unit, 1.0))
    try:
        return Number(f"{float(value) * size:.12g}" if size != 1 else value, smallest, f"{value} {unit}")
    except ValueError:  # 5-10 minutes
        return Number(value, unit)


def _one_span(given: Sequence[Token], at: int, lexicon: Lexicon) -> Number | None:
    """ "in a year", unless it is counted what happens in each."""
    unit = lexicon.units.get(given[at + 1].text, "") if 0 < at < len(given) - 1 else ""
    if unit not in _SPANS or given[at - 1].text not in _WITHIN:
        return None
    return None if any(token.text in _COUNTING for token in given) else _measured("1", unit)


def _named(given: Sequence[Token], at: int, lexicon: Lexicon) -> Number | None:
    token = given[at]
    word = token.text
    for names, unit in ((lexicon.months, "month"), (lexicon.weekdays, "weekday")):
        if word in names:
            sure = (len(word) > 3 and word != "march") or (token.raw[:1].isupper() and not token.opens)
            called = len(word) > 3 or at == 0 or given[at - 1].text not in ("the", "a")  # "from the Sun"
            if called and (sure or _by_a_number(given, at)):
                return Number(str(names[word]), unit)
    if word.endswith("s") and word[:-1] in lexicon.weekdays and len(word) > 4:
        return Number(str(lexicon.weekdays[word[:-1]]), "weekday")
    return None


def _by_a_number(given: Sequence[Token], at: int) -> bool:
    return any(
        0 <= other < len(given) and given[other].text.isdigit() for other in (at - 1, at + 1)
    ) and given[at].text not in ("sat", "sun", "wed")


def _near_month(given: Sequence[Token], start: int, taken: int, lexicon: Lexicon) -> bool:
    around = [given[i].text for i in (start - 1, start + taken, start + taken + 1) if 0 <= i < len(given)]
    return any(word in lexicon.months for word in around)


def _counted(given: Sequence[Token], start: int) -> tuple[str, int, bool] | None:
    """Canonical digits, the tokens they take, and whether it is an ordinal word."""
    if start >= len(given):
        return None
    word = given[start].text
    if word[0].isdigit():
        plain = word.replace(",", "")
        return _powered(given, start, plain, 1)
    if word in _ORDINALS:
        after_number = start > 0 and (given[start - 1].text.isdigit() or given[start - 1].text in _SMALL)
        return None if after_number else (str(_ORDINALS[word]), 1, True)
    if word == "half":
        return str(_HALF), 1, False
    if word not in _SMALL and not (
        word in ("a", "an") and start + 1 < len(given) and given[start + 1].text in _POWERS
    ):
        return None
    value, taken = _SMALL.get(word, 1), 1
    if value >= 20 and start + 1 < len(given):
        small = _SMALL.get(given[start + 1].text, 0)
        if 0 < small < 10:
            value, taken = value + small, 2
    return _powered(given, start, str(value), taken)


def _powered(given: Sequence[Token], start: int, digits: str, taken: int) -> tuple[str, int, bool]:
    while start + taken < len(given) and given[start + taken].text in _POWERS and digits.count(".") < 2:
        try:
            digits = f"{float(digits) * _POWERS[given[start + taken].text]:.12g}"
        except ValueError:  # 24/7, 14:05, 2026-05-03
            break
        taken += 1
    if digits.isdigit():
        digits = digits.lstrip("0") or "0"
    return digits, taken, False


def _clock(value: str, following: str) -> tuple[Number, int]:
    hours, _, minutes = value.partition(":")
    if not hours.isdecimal() or not (minutes or "0").isdecimal():
        return Number(value, ""), 1
    hour = int(hours)
    marked = following in ("am", "pm", "a.m", "p.m")
    if marked:
        hour = hour % 12 + (12 if following.startswith("p") else 0)
    return Number(str(60 * hour + int(minutes or 0)), "clock"), 1 + marked
