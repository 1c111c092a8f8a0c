"""Redaction: questions and answers with personal data or secrets are not kept.

Nothing is blacked out: an answer with such a thing in it, or in its question, is not stored, and that costs no more
than a later hit. In doubt it is therefore not stored, as long as dates, prices, versions and order numbers pass. Kinds:

- key: keys, tokens and passwords in the forms in which they are issued or sent (data/keys.yaml).
- e-mail: addresses.
- card: payment cards, by the prefixes and lengths of their issuers and the Luhn check, in groups or not.
- iban: bank accounts, by the structure of their country and their check digits.
- national_id: numbers that states give to persons (data/national_ids.yaml).
- phone: telephone numbers; those in national form for the regions that are given.

Needs the distributions phonenumbers (for phone) and python-stdnum (for card, iban and national_id).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files

from pipeline.cache.redaction.numbers import NationalIds, holds_card, holds_iban
from pipeline.cache.redaction.phones import PHONE_REGIONS, PhoneNumbers
from pipeline.resources import parse_yaml

__all__ = ["KINDS", "PHONE_REGIONS", "Redaction"]

# Whether a text holds one.
Holds = Callable[[str], bool]
# One character before the @ is enough to tell; more of them would make long texts take long.
_EMAIL = re.compile(r"[\w.+-]@[\w-]+(?:\.[\w-]+)*\.[a-zA-Z]{2,}")
# Kinds that have a form come before those that are recognized by their digits.
KINDS = ("key", "e-mail", "card", "iban", "national_id", "phone")


class Redaction:
    """Judges questions and answers; safe to use from any number of threads.

    >>> Redaction().objection("Who?", "Write to ada@example.org")
    'e-mail'
    """

    def __init__(
        self,
        kinds: Iterable[str] | None = None,
        own: Mapping[str, str] | None = None,
        phone_regions: Sequence[str] = PHONE_REGIONS,
    ) -> None:
        """
        Args:
            kinds: some of `KINDS`; None: all.
            own: further patterns (regular expressions) by name.
            phone_regions: ISO 3166 codes (GB, US) of the countries whose national telephone numbers are known.

        Raises:
            ValueError: a kind or a region is not known, or a pattern is no regular expression.
            ImportError: a distribution is missing that one of the kinds needs.
        """
        chosen = set(KINDS if kinds is None else kinds)
        if unknown := sorted(chosen - set(KINDS)):
            raise ValueError(f"{', '.join(unknown)}: not known (there are {', '.join(KINDS)})")
        made: dict[str, Callable[[], Holds]] = {
            "e-mail": lambda: _searching(_EMAIL),
            "key": lambda: _searching(_keys()),
            "card": lambda: _needing("stdnum.luhn", holds_card),
            "iban": lambda: _needing("stdnum.iban", holds_iban),
            "national_id": lambda: _needing("stdnum.luhn", NationalIds()),
            "phone": lambda: PhoneNumbers(phone_regions),
        }
        self._kinds = {kind: made[kind]() for kind in KINDS if kind in chosen}
        for name, pattern in (own or {}).items():
            try:
                self._kinds[name] = _searching(re.compile(pattern))
            except re.error as error:
                raise ValueError(f"{name} = {pattern}: is not a regular expression ({error})") from None

    def objection(self, turn: str, answer: str) -> str | None:
        """Return the first kind that a question or its answer holds, in the order of `KINDS` and then own patterns.

        None: they may be kept.
        """
        return next((kind for kind, holds in self._kinds.items() if holds(turn) or holds(answer)), None)


def _needing(module: str, holds: Holds) -> Holds:
    """Raise ImportError now, and not when a text is judged."""
    import_module(module)
    return holds


def _searching(pattern: re.Pattern[str]) -> Holds:
    return lambda text: pattern.search(text) is not None


@cache
def _keys() -> re.Pattern[str]:
    text = (files(__package__) / "data" / "keys.yaml").read_text(encoding="utf-8")
    forms = "|".join(f"(?:{row['form']})" for row in parse_yaml(text))
    return re.compile(f"(?<![A-Za-z0-9])(?:{forms})", re.ASCII)
