"""What keeps an answer from being stored, and what does not."""

from __future__ import annotations

import pytest

from pipeline.cache.redaction import Redaction

HELD = {
    "e-mail": ["Write to ada.l+x@example.co.uk.", "ada@example.org"],
    "card": ["4111 1111 1111 1111", "card 5500-0000-0000-0004 is declined", "378282246310005"],
    "key": [
        "sk-abcdefghij0123456789ABCD", "use AKIAIOSFODNN7EXAMPLE", "ghp_0123456789abcdefghijABCDEFGHIJ012345",
        "-----BEGIN RSA PRIVATE KEY-----", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc_def",
    ],
    "phone": ["Call +44 20 7946 0958", "(555) 010-9999", "555-010-9999 at night", "+1 (415) 555-2671"],
}  # fmt: skip
PASSES = [
    "It costs $1,299.99 since 2024-05-17.", "Order 4111 1111 1111 1112 was sent.", "pi is 3.14159265358979323846",
    "Version 1.2.3-4567", "10 + 20 = 30", "at 10:30:00 on 12.05.2024", "user @ home", "skiing-lessons for all of us",
    "tracking 00340434161094042557 x", "IP 192.168.100.200",
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in HELD.items() for text in texts])
def test_held(kind: str, text: str) -> None:
    assert Redaction().objection("Hi", text) == kind
    assert Redaction().objection(text, "Hi") == kind
    assert Redaction(kinds=[other for other in HELD if other != kind]).objection("Hi", text) is None


@pytest.mark.parametrize("text", PASSES)
def test_passes(text: str) -> None:
    assert Redaction().objection(text, text) is None


def test_patterns_of_ones_own() -> None:
    assert Redaction(own={"ticket": r"TCK-\d+"}).objection("", "see TCK-42") == "ticket"


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(ValueError, match="ticket = \\(: is not a regular expression"):
        Redaction(own={"ticket": "("})


def test_a_kind_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="iban: not known"):
        Redaction(kinds=["iban"])
