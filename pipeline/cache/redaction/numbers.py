"""Numbers with check digits: payment cards, bank accounts (IBAN), and numbers that states give to persons."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any, NamedTuple

from pipeline.resources import parse_yaml

# Spaces, hyphens and digits as people and word processors write them; what is not seen goes.
_ZEROS = (0x660, 0x6F0, 0x966, 0x9E6, 0xE50, 0xFF10)  # Arabic, Persian, Devanagari, Bengali, Thai, full width
_PLAIN = str.maketrans(
    dict.fromkeys("\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " ")
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d", "-")
    | dict.fromkeys("\xad\u200b\u200c\u200d\u2060\ufeff")
    | {"\uff0b": "+", "\u2024": ".", "\uff0e": "."}
    | {chr(zero + digit): str(digit) for zero in _ZEROS for digit in range(10)}
)  # fmt: skip


def to_ascii(text: str) -> str:
    """Replace spaces, hyphens and digits of all kinds by those of ASCII."""
    return text if text.isascii() else text.translate(_PLAIN)


_GROUPED = re.compile(r"(?<!\w)(?<!\d[.,])\d+(?:(?: {1,2}|[-./])\d+)*(?!\w)(?![.,]\d)")
_GROUPS = re.compile(r"(\D*)(\d+)")
_CARD_DIGITS = range(13, 20)
# First digits of issuers (from, to), and how many digits their cards have.
# source: ISO/IEC 7812-1 and the ranges that the networks publish, as of 2025; 12 digits and UATP are left out.
_ISSUERS = (
    ("4", "4", (13, 16, 19)),  # Visa
    ("51", "55", (16,)), ("2221", "2720", (16,)),  # Mastercard
    ("34", "34", (15,)), ("37", "37", (15,)),  # American Express
    ("300", "305", (14, 16)), ("3095", "3095", (14, 16)), ("36", "36", (14, 16)), ("38", "39", (14, 16)),  # Diners
    ("3528", "3589", (16, 17, 18, 19)),  # JCB
    ("50", "50", (16, 17, 18, 19)), ("56", "69", (16, 17, 18, 19)),  # Maestro, Discover, UnionPay, RuPay, Verve
    ("81", "82", (16,)), ("2200", "2204", (16, 17, 18, 19)),  # UnionPay, RuPay; Mir
    ("8600", "8600", (16,)), ("9792", "9792", (16,)), ("9860", "9860", (16,)),  # Uzcard, Troy, Humo
)  # fmt: skip


def holds_card(text: str) -> bool:
    """Whether a text holds the number of a payment card, in one piece or in groups."""
    from stdnum import luhn

    for run in _GROUPED.finditer(to_ascii(text)):
        if len(run[0]) >= _CARD_DIGITS.start:
            for digits in _card_sized(run[0]):
                if _of_an_issuer(digits) and luhn.is_valid(digits):
                    return True
    return False


def _card_sized(run: str) -> Iterator[str]:
    """Digits of groups that follow each other in a run, as many as a card has: it may stand between other numbers."""
    groups = [(match[1], match[2]) for match in _GROUPS.finditer(run)]
    for at, (before, first) in enumerate(groups):
        decimals = before == "." or (at + 1 < len(groups) and groups[at + 1][0] == ".")
        if len(first) in _CARD_DIGITS and not decimals:
            yield first
        if len(first) == 6 and at + 1 < len(groups):
            yield first + groups[at + 1][1]
        if len(first) == 4:
            digits = first
            for _, group in groups[at + 1 : at + 5]:
                digits += group
                if len(digits) in _CARD_DIGITS and 1 <= len(group) <= 6:
                    yield digits


def _of_an_issuer(digits: str) -> bool:
    return any(
        first <= digits[: len(first)] <= last and len(digits) in lengths for first, last, lengths in _ISSUERS
    )


_IBAN_BEGINS = re.compile(r"(?<![A-Za-z0-9])[A-Za-z]{2}\d{2}(?=[ -]?[A-Za-z0-9])")
_IBAN_PART = re.compile(r"[ -]{0,2}([A-Za-z0-9]+)")


def holds_iban(text: str) -> bool:
    """Whether a text holds the number of a bank account: country, structure and check digits are right."""
    from stdnum import iban

    text = to_ascii(text)
    for begin in _IBAN_BEGINS.finditer(text):
        length = _iban_length(begin[0][:2].upper())
        number, at = "", begin.start()
        while len(number) < length and (part := _IBAN_PART.match(text, at)):
            number, at = number + part[1], part.end()
        if length and len(number) == length and iban.is_valid(number):
            return True
    return False


@cache
def _iban_length(country: str) -> int:
    """How many characters the IBAN of a country has, 0 if it has none."""
    from stdnum import numdb

    # "8!n10!n" is 8 and 10 digits, after country and check digits
    ((_, facts),) = numdb.get("iban").info(country)
    sizes = re.findall(r"(\d+)!", facts.get("bban", ""))
    return 4 + sum(map(int, sizes)) if sizes else 0


class _NationalId(NamedTuple):
    """See data/national_ids.yaml."""

    check: Any  # a module of stdnum, None if there is none for this number
    alone: re.Pattern[str] | None
    named: re.Pattern[str] | None
    words: tuple[str, ...]  # in lower case

    def valid(self, number: str) -> bool:
        """Whether digits, dates and areas are those of such a number."""
        if self.check is None:
            return True
        try:
            self.check.validate(number)
        # cn.ric 2.2: KeyError of a county that it does not know
        except (self.check.ValidationError, LookupError):
            return False
        return True


_DENSE = re.compile(r"\d(?:[^\d\n]{0,3}\d){5,}")  # six digits near each other, as all have that count alone
_FOUR_DIGITS = re.compile(r"\d(?:[^\d\n]{0,3}\d){3}")  # as all have
_AROUND = 20  # characters before and after the digits that may belong to the number
_BEFORE, _AFTER = 24, 48  # characters around a word within which its number stands
_WORD = re.compile(r"[^\W\d_]+")


class NationalIds:
    """Judges texts. Needs the distribution python-stdnum."""

    def __init__(self) -> None:
        self._ids = _national_ids()

    def __call__(self, text: str) -> bool:
        """Whether a text holds such a number."""
        if not _FOUR_DIGITS.search(text):
            return False
        text = to_ascii(text)
        return self._holds_alone(text) or self._holds_named(text)

    def _holds_alone(self, text: str) -> bool:
        for dense in _DENSE.finditer(text):
            start, end = max(0, dense.start() - _AROUND), min(len(text), dense.end() + _AROUND)
            for known in self._ids:
                if known.alone is not None and _finds(known.alone, known, text, start, end):
                    return True
        return False

    def _holds_named(self, text: str) -> bool:
        lower = text.lower()
        present = frozenset(_WORD.findall(lower))
        return any(
            _finds(known.named, known, text, max(0, at - _BEFORE), min(len(text), at + len(word) + _AFTER))
            for known in self._ids
            if known.named is not None
            for word in known.words
            if (word in present if word.isalpha() and word.isascii() else word in lower)
            for at in _places(word, lower)
        )


def _finds(form: re.Pattern[str], known: _NationalId, text: str, start: int, end: int) -> bool:
    """Whether a valid number of a form begins and ends in a part of a text, and is not cut off by its end."""
    return any(
        (match.end() < end or end == len(text)) and known.valid(match[0])
        for match in form.finditer(text, start, end)
    )


def _places(word: str, lower: str) -> Iterator[int]:
    """Where a word stands by itself."""
    at = lower.find(word)
    while at >= 0:
        before, after = lower[at - 1 : at], lower[at + len(word) : at + len(word) + 1]
        if not word.isascii() or not (before.isalpha() or after.isalpha()):
            yield at
        at = lower.find(word, at + 1)


_OPTIONAL_SEPARATOR = "[ ./-]?"


@cache
def _national_ids() -> tuple[_NationalId, ...]:
    text = (files(__package__) / "data" / "national_ids.yaml").read_text(encoding="utf-8")
    return tuple(
        _NationalId(
            None if row["id"] == "gb.nino" else import_module(f"stdnum.{row['id']}"),
            _form(row.get("alone")),
            _form(row.get("named")),
            tuple(row.get("words", ())),
        )
        for row in parse_yaml(text)
    )


def _form(form: str | None) -> re.Pattern[str] | None:
    """Compiled, where it is not a part of a longer number or word."""
    if form is None:
        return None
    spaced = form.replace("~", _OPTIONAL_SEPARATOR)
    return re.compile(rf"(?<!\w)(?<!\d[-./])(?:{spaced})(?!\w)(?![-./]\d)")
