"""Two questions of the same words: which order is only another way to say it, and which says something else."""

from __future__ import annotations

import pytest

from pipeline.cache.semantic.scoring.facts import facts
from pipeline.cache.semantic.verification import CHECKS
from pipeline.cache.semantic.verification.checks import SURE
from pipeline.cache.semantic.verification.parsed_question import read


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Map first and filter afterwards.", "Filter first and map afterwards."),
        ("my neighbour's tree fell on my shed", "my tree fell on my neighbour's shed"),
        ("A parcel is marked delivered but I haven't got it.", "A parcel isn't marked delivered but I have got it."),
        ("redirect http to https in nginx", "redirect https to http in nginx"),
        ("What is 100 USD in yen?", "What is 100 yen in USD?"),
        ("Is a square always a rectangle?", "Is a rectangle always a square?"),
        ("What's the last train out of Glasgow to Edinburgh?", "What's the last train out of Edinburgh to Glasgow?"),
    ],
)  # fmt: skip
def test_what_has_changed_places_forbids_a_hit(one: str, other: str) -> None:
    for asked, kept in ((one, other), (other, one)):
        assert any(check(read(asked), read(kept)) for check in CHECKS.values())
        assert facts(asked, kept, 0.99).forbidden(tuple(CHECKS)) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Is she a nurse or a doctor?", "Is she a doctor or a nurse?"),
        ("What's the distance between Jupiter and Mars?", "What's the distance between Mars and Jupiter?"),
        ("In Rome, where can I eat?", "Where can I eat in Rome?"),
        ("Why won't my dough rise?", "Why will my dough not rise?"),
        ("How can I permanently delete my account?", "How can I delete my account permanently?"),
    ],
)
def test_another_order_that_says_the_same_does_not(one: str, other: str) -> None:
    assert CHECKS["order"](read(one), read(other)) not in SURE
    assert facts(one, other, 0.99).forbidden(tuple(CHECKS)) is None
