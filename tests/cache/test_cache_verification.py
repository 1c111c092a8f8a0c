"""Whether one answer serves two questions: what the checks let pass, and what they do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pipeline.cache.semantic.scoring.facts import facts
from pipeline.cache.semantic.scoring.spelling import respelled
from pipeline.cache.semantic.verification import CHECKS, default_verifier

# Pairs of questions as users of a support desk ask them, written for these tests. Categories: what the checks make of
# them; "not seen" are pairs with one answer of which the checks are too careful to see it, "taken for the same" traps
# that they do not.
PAIRS = [
    json.loads(line)
    for line in Path(__file__).with_name("question_pairs.jsonl").read_text("utf-8").splitlines()
]
VERIFIER = default_verifier()
QUESTIONS = sorted({pair[side] for pair in PAIRS for side in "ab"})
questions = st.sampled_from(QUESTIONS)


def objection(asked: str, kept: str) -> str | None:
    return VERIFIER.objection(asked, kept, 0.95)


def of(category: str) -> list[tuple[str, str]]:
    return [(pair["a"], pair["b"]) for pair in PAIRS if pair["category"] == category]


def test_one_answer_serves_both() -> None:
    refused = {pair: why for pair in of("seen") if (why := objection(*pair)) is not None}
    assert refused == {}


def test_each_has_an_answer_of_its_own() -> None:
    served = [(a, b) for a, b in of("near") if objection(a, b) is None or objection(b, a) is None]
    assert served == []


def test_most_repeats_are_seen() -> None:
    assert len(of("seen")) > 1.5 * len(of("not seen"))


@pytest.mark.parametrize(
    ("check", "one", "other"),
    [
        ("numbers", "Can I pay in 3 parts?", "Can I pay in 4 parts?"),
        ("numbers", "Can I pay in 3 parts?", "Can I pay in parts?"),
        ("numbers", "Does it weigh 5 kg?", "Does it weigh 5 lb?"),
        ("numbers", "Is it open at 9 am?", "Is it open at 9 pm?"),
        ("numbers", "Will it arrive on Monday?", "Will it arrive on Tuesday?"),
        ("numbers", "Count from 5 to 10", "Count from 10 to 5"),
        ("codes", "What is error E1234?", "What is error E1243?"),
        ("codes", "Is https://a.example/x up?", "Is https://a.example/y up?"),
        ("codes", "What does git commit -a do?", "What does git commit -m do?"),
        ("codes", "When is git push --force safe?", "When is git push --force-with-lease safe?"),
        ("quotes", 'What does "save as" do?', 'What does "save all" do?'),
        ("names", "Did Anna Smith sign the new contract?", "Did Maria Smith sign the new contract?"),
        ("openings", "Why did my order ship?", "When did my order ship?"),
        ("pronouns", "Is his account open?", "Is her account open?"),
        ("tenses", "Who is the president?", "Who was the president?"),
        ("joining", "Is it red and blue?", "Is it red or blue?"),
        ("sense", "Is it safe to eat this?", "Is it not safe to eat this?"),
        ("sense", "How do I lock my phone?", "How do I unlock my phone?"),
        ("sense", "Can I pay before delivery?", "Can I pay after delivery?"),
        ("sense", "Do all plans have it?", "Do some plans have it?"),
        ("words", "Can I return shoes?", "Can I return worn shoes?"),
        ("order", "Can a doctor sue a patient?", "Can a patient sue a doctor?"),
        ("order", "Does Anna owe Maria money?", "Does Maria owe Anna money?"),
        ("order", "Convert PDF to Word", "Convert Word to PDF"),
    ],
)
def test_a_check_says_what_differs(check: str, one: str, other: str) -> None:
    for asked, kept in ((one, other), (other, one)):
        assert default_verifier([check]).objection(asked, kept, 0.95) is not None
        for question in (one, other):
            assert default_verifier([check]).objection(question, f"{question} Please!", 0.95) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Is Anna loved by Tom?", "Does Tom love Anna?"),
        ("Is Anna hurt by Tom?", "Does Tom hurt Anna?"),
        ("Is Anna married to Tom?", "Is Tom married to Anna?"),
        ("How can I become less patient?", "How can I become more impatient?"),
        ("How can I become a bad person?", "How can I become a person who is not good?"),
        ("Is she a Turkish nurse?", "Is she a nurse and Turkish?"),
        ("Does it cost $1,000?", "Does it cost one thousand dollars?"),
        ("Is it open at 3 pm?", "Is it open at 15:00?"),
        ("Are 500 and 1000 rupee notes banned?", "Are 1000 and 500 rupees notes banned?"),
    ],
)
def test_other_words_for_the_same(one: str, other: str) -> None:
    assert objection(one, other) is None
    assert objection(other, one) is None


def test_who_does_it_is_told_in_the_passive_voice_too() -> None:
    assert objection("Is Anna loved by Tom?", "Does Anna love Tom?") is not None


@given(st.text(max_size=200))
def test_a_question_serves_itself(text: str) -> None:
    assert objection(text, f"{text} ") is None


@given(
    questions, st.sampled_from(["Please, {}", "{} Thanks!", "Hello! {}", "Could you tell me: {}", "  {}  "])
)
def test_being_polite_changes_nothing(question: str, how: str) -> None:
    assert objection(question, how.format(question)) is None


@given(questions, questions)
def test_both_ways_it_is_the_same(one: str, other: str) -> None:
    assert (objection(one, other) is None) == (objection(other, one) is None)


@given(questions, st.integers(0, 10**6), st.integers(0, 10**6))
def test_another_number_is_another_question(question: str, one: int, other: int) -> None:
    assume(one != other)
    assert objection(f"{question} Number {one}", f"{question} Number {other}") is not None


# What readers of questions have stumbled over, or might: options, endings without a word, digits that int() refuses.
ODD = (
    "-rf", "--force", "-a-b", "-", "n't", "N't", "'s", "’s", "5²", "12:5²", "² million", "١:٣٠", "pm", "a.m", "$", "°",
    "half an", "twenty", "or more", "by", "according to", "who", "-who", "https://", "@", "a@b", "_", "\x00", "\ud800",
    "ŉ", "İ", '"', "`", "''", ", right?", "1,,2", "1..2", "one", "9" * 400,
)  # fmt: skip
words = st.one_of(st.sampled_from(ODD), st.sampled_from(QUESTIONS), st.text(max_size=5))
odd_texts = st.one_of(st.text(max_size=300), st.builds(str.join, st.sampled_from(["", " "]), st.lists(words)))


@given(odd_texts, odd_texts)
@example("How do I undo rm -rf in linux?", "How do I undo it?")
@example("Why n't I?", "Is it 5² pm?")
@settings(deadline=None)
def test_no_text_is_too_odd(one: str, other: str) -> None:
    assert isinstance(objection(one, other), str | None)
    for asked, kept in (respelled(one, other, QUESTIONS.__contains__), (one, other)):
        assert np.isfinite(facts(asked, kept, 0.95).values).all()


def test_checks_are_chosen_by_name() -> None:
    one, other = "Can I pay in 3 parts?", "Can I pay in 4 parts?"
    assert default_verifier([name for name in CHECKS if name != "numbers"]).objection(one, other, 0.9) is None
    with pytest.raises(ValueError, match=r"checks number: not known \(one of numbers, codes, "):
        default_verifier(["number"])
