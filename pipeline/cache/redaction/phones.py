"""Telephone numbers in the forms that people write, told from dates, prices and order numbers.

What the digits may be is known by `phonenumbers` (Google's libphonenumber). A number that begins with + is one in any
region. One in national form is read for each given region, and counts where it

- begins with the trunk prefix 0, and is valid there, or is as long and grouped as numbers are (those that are kept free
  for films and examples, such as 07700 900123, are not valid, and look like any other);
- is written as North Americans do: (555) 010-9999, 555-010-9999;
- is valid and grouped as the region groups, unless other numbers are grouped so, too (512 345 678);
- is valid, or as long as numbers are, and a word such as "phone" stands before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from pipeline.cache.redaction.numbers import to_ascii

# By default: where most of those live who write the languages that models are asked in, as far as a number in national
# form is seldom taken for something else there.
PHONE_REGIONS = (
    "US", "GB", "IE", "DE", "AT", "CH", "FR", "BE", "NL", "ES", "IT", "PT", "SE", "PL", "IN", "AU", "NZ", "JP", "BR",
    "ZA",
)  # fmt: skip
_CANDIDATE = re.compile(
    r"(?<![\w+])(?<!\d[.,:/-])(?:\+ ?)?(?:\(\+?)?\d(?:[ .()/-]{0,3}\d){6,16}(?!\w)(?![.,]\d)"
)
_NORTH_AMERICAN = re.compile(
    r"(?:1[ .-])?(?:\(\d{3}\) ?\d{3}[ .-]|\d{3}([.-])\d{3}\1)\d{4}|1([ .-])\d{3}\2\d{3}\2\d{4}"
)
_POSTCODE = re.compile(r"0\d{4}-\d{4}")  # of the United States, with its route: 02110-1301
_DATE = re.compile(
    r"(?<!\d)(?<!\d[./-])(?:\d{1,2}([./-])\d{1,2}\1(?:19|20)?\d\d(?!\d|\1\d)|(?:19|20)\d\d([./-])\d{1,2}\2\d{1,2}(?!\d|\2\d))"
)
_GROUP = re.compile(r"\d+")
_COUNTED_UP = "01234567890123"  # an alphabet of digits, and nobody's number
_NAMED = re.compile(
    r"(?<![^\W\d_])(?:(?:smart|cell|mobile ?)?phones?|tele(?:ph|f)on\w*|t[eé]l[eé]?|mobile?|cell|fax|whatsapp|sms"
    r"|hotline|helpline|landline|(?:call|ring|dial|text|reach) (?:me|us|him|her|them|at|on)|dial|handy(?:nummer)?"
    r"|rufnummer|durchwahl|anruf\w*|portable|appele[rz]|tel[eé]fon[oe]|m[oó]vil|celular|ll[aá]m[ae]\w*|cellulare|chiama\w*"
    r"|telem[oó]vel|lig(?:ue|ar)|telefoon|mobiel|bellen)(?![^\W\d_])",
    re.IGNORECASE,
)
_BEFORE = 40  # characters before a number within which a word names it
# Readings of the numbers of one text. One that needs more is a list of numbers, and would take long (0.1 ms each).
_MOST_READINGS = 500


class PhoneNumbers:
    """Finds telephone numbers in texts. Needs the distribution phonenumbers."""

    def __init__(self, regions: Sequence[str] = PHONE_REGIONS) -> None:
        """`regions`: ISO 3166 codes. Raises ValueError for one that is not known."""
        import phonenumbers

        if unknown := [region for region in regions if region not in phonenumbers.SUPPORTED_REGIONS]:
            raise ValueError(
                f"phone region {', '.join(unknown)}: not known (write ISO 3166 codes, such as GB)"
            )
        self._regions = tuple(regions)
        self._in_north_america = any(phonenumbers.country_code_for_region(region) == 1 for region in regions)
        self._with_trunk_0 = any(
            phonenumbers.ndd_prefix_for_region(region, True) == "0" for region in regions
        )
        self._by_groups = _by_groups(regions)

    def __call__(self, text: str) -> bool:
        """Whether a text holds a telephone number."""
        from phonenumbers import Leniency, PhoneNumberMatcher

        text = to_ascii(text)
        readings = 0
        for candidate in _CANDIDATE.finditer(text):
            number = candidate[0]
            if self._in_north_america and _NORTH_AMERICAN.fullmatch(number):
                return True
            if self._with_trunk_0 and _likely(number):
                return True
            for region, leniency in self._readings(
                number, text[max(0, candidate.start() - _BEFORE) : candidate.start()]
            ):
                readings += 1
                matcher = PhoneNumberMatcher(number, region, leniency=getattr(Leniency, leniency))
                if readings > _MOST_READINGS or matcher.has_next():
                    return True
        return False

    def _readings(self, number: str, before: str) -> Iterator[tuple[str | None, str]]:
        """As what a number has to be read: region (None: any), and how strictly. Nothing for most numbers of texts."""
        digits, groups, named = _digits(number), _groups(number), _NAMED.search(before) is not None
        if "+" in number:
            yield None, "POSSIBLE"
        elif _of_something_else(number) or (digits in _COUNTED_UP and len(groups) == 1 and not named):
            return
        elif number.startswith("00"):
            yield "GB", "VALID"  # a call to abroad, as most regions begin it
        elif digits.startswith("0"):
            # seven or eight digits are as often a number of something else
            if len(digits) > 8 or named or number.startswith("("):
                strict = "STRICT_GROUPING" if groups[0] == 1 else "VALID"
                yield from ((region, strict) for region in self._regions)
        else:
            if len(groups) > 2 or "-" not in number:  # 75000-90000 is a range
                yield from ((region, "STRICT_GROUPING") for region in self._by_groups.get(groups, ()))
            if named:
                strict = "POSSIBLE" if len(digits) >= 10 and not _in_thousands(groups) else "VALID"
                yield from ((region, strict) for region in self._regions)


def _of_something_else(number: str) -> bool:
    """Whether it is written as no telephone number is: a date, a postcode, a fraction, an IP address, a row."""
    groups, separators = _groups(number), set(re.sub(r"[\d()]", "", number))
    return (
        _DATE.search(number) is not None
        or _POSTCODE.fullmatch(number) is not None
        or len(groups) > 6
        or (set(groups) == {2} and len(groups) != 5 and separators == {" "})
        or ("." in separators and (len(separators) > 1 or len(groups) in (2, 4)))
    )


def _digits(number: str) -> str:
    return "".join(_GROUP.findall(number))


def _groups(number: str) -> tuple[int, ...]:
    """How many digits stand together: 3, 2, 2 and 2 of "612 34 56 78"."""
    return tuple(map(len, _GROUP.findall(number)))


def _likely(number: str) -> bool:
    """Whether it is a number in national form by its looks: a 0, ten or eleven digits, groups of two and more."""
    digits, groups = _digits(number), _groups(number)
    return (
        digits[0] == "0" != digits[1]
        and len(digits) in (10, 11)
        and 2 <= len(groups) <= 5
        and 2 <= groups[0] <= 6
        and min(groups) > 1
        and "+" not in number
        and not _of_something_else(number)
    )


def _in_thousands(groups: Sequence[int]) -> bool:
    """Whether digits are grouped as amounts are: "512 345 678"."""
    return len(groups) > 1 and groups[0] <= 3 and all(size == 3 for size in groups[1:])


def _by_groups(regions: Sequence[str]) -> Mapping[tuple[int, ...], tuple[str, ...]]:
    """How numbers without a trunk prefix are grouped -> where; less what amounts and ranges (4000-6000) are."""
    import phonenumbers as known

    by_groups: dict[tuple[int, ...], dict[str, None]] = {}
    for region in regions:
        for kind in known.PhoneNumberType.values():
            example = known.example_number_for_type(region, kind)
            if example is None:
                continue
            abroad = known.format_number(example, known.PhoneNumberFormat.INTERNATIONAL)
            written = abroad.partition(" ")[2]
            groups = _groups(written)
            matcher = known.PhoneNumberMatcher(written, region, leniency=known.Leniency.STRICT_GROUPING)
            if sum(groups) > 8 and written[0] != "0" and not _in_thousands(groups) and matcher.has_next():
                by_groups.setdefault(groups, {})[region] = None
    return {groups: tuple(group) for groups, group in by_groups.items()}
