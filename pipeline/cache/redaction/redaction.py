"""The kinds of what may not be kept, and the judge that asks for those of a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files

import yaml

from pipeline.cache.redaction.numbers import NationalIds, holds_card, holds_iban
from pipeline.cache.redaction.phones import PHONE_REGIONS, PhoneNumbers

Holds = Callable[[str], bool]  # whether a text holds one
# One character before the @ is enough to tell; more of them would make long texts take long.
_EMAIL = re.compile(r"[\w.+-]@[\w-]+(?:\.[\w-]+)*\.[a-zA-Z]{2,}")
# In this order: what is told by its form before what is told by its digits.
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
            kinds: of `KINDS`; None: all.
            own: further patterns (regular expressions) by name.
            phone_regions: ISO 3166 codes (GB, US) whose national telephone numbers are known.

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
        """The kind that a question or its answer holds, None if they may be kept.

        Args:
            turn: text of the question.
            answer: text of its answer.

        Returns:
            The first kind that is found, in the order of `KINDS`, then the name of an own pattern.
        """
        return next((kind for kind, holds in self._kinds.items() if holds(turn) or holds(answer)), None)


def _needing(module: str, holds: Holds) -> Holds:
    """Raises ImportError now, and not when a text is judged."""
    import_module(module)
    return holds


def _searching(pattern: re.Pattern[str]) -> Holds:
    return lambda text: pattern.search(text) is not None


@cache
def _keys() -> re.Pattern[str]:
    text = (files(__package__) / "data" / "keys.yaml").read_text(encoding="utf-8")
    forms = "|".join(f"(?:{row['form']})" for row in yaml.safe_load(text))
    return re.compile(f"(?<![A-Za-z0-9])(?:{forms})", re.ASCII)
