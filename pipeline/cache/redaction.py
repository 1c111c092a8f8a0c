"""What may not be kept: answers and questions that hold somebody's e-mail address, card, key or telephone number.

Nothing is blacked out: an answer with such a thing in it is simply not stored. Digits count as a card only if they pass
the Luhn check, and as a telephone number only in the forms that people write them in, so that prices and dates pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from re import Pattern

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)*\.[a-zA-Z]{2,}")
_CARD = re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.])")
# Forms in which keys are issued: "sk-…", AWS, GitHub, Slack, Google, JSON web tokens, private keys.
_KEY = re.compile(
    r"\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{16,}|\bA(?:KIA|SIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bAIza[A-Za-z0-9_-]{30,}|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)  # fmt: skip
_PHONE = re.compile(
    r"(?<![\w+.])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d(?:[ .-]?\d){6,11}"  # +44 20 7946 0958
    r"|\(\d{3}\) ?\d{3}[ -]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w])"  # (555) 010-9999, 555-010-9999
)


class Redaction:
    """The patterns that keep an answer from being stored.

    >>> Redaction().objection("Who?", "Write to ada@example.org")
    'e-mail'
    """

    def __init__(self, kinds: Iterable[str] | None = None, own: Mapping[str, str] | None = None) -> None:
        """All known kinds by default; `own` are further patterns (regular expressions) by name.

        Raises:
            ValueError: a kind is not known, or a pattern is none.
        """
        chosen = tuple(KINDS) if kinds is None else tuple(kinds)
        unknown = [kind for kind in chosen if kind not in KINDS]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not known (there are {', '.join(KINDS)})")
        self._patterns: dict[str, Pattern[str]] = {kind: KINDS[kind] for kind in chosen}
        for name, pattern in (own or {}).items():
            try:
                self._patterns[name] = re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{name} = {pattern}: is not a regular expression ({error})") from None

    def objection(self, turn: str, answer: str) -> str | None:
        """The kind that a question or its answer holds, None if they may be kept."""
        for kind, pattern in self._patterns.items():
            for text in (turn, answer):
                if any(kind != "card" or _luhn(found[0]) for found in pattern.finditer(text)):
                    return kind
        return None


KINDS: Mapping[str, Pattern[str]] = {"e-mail": _EMAIL, "card": _CARD, "key": _KEY, "phone": _PHONE}


def _luhn(text: str) -> bool:
    """Whether the digits are those of a card: their weighted sum ends in 0.

    >>> _luhn("4111 1111 1111 1111"), _luhn("4111 1111 1111 1112")
    (True, False)
    """
    digits = [int(char) for char in text if char.isdigit()]
    doubled = [
        digit if index % 2 == 0 else sum(divmod(2 * digit, 10)) for index, digit in enumerate(digits[::-1])
    ]
    return sum(doubled) % 10 == 0
