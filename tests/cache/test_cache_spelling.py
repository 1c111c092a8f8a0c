"""Spelling: what is put right beside another question, and what stays, because it is another word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cache.semantic.scoring import Learned, verifier_for
from pipeline.cache.semantic.scoring.spelling import every_word, respelled
from tests.support.minilm import minilm


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("what is compund interest", "What is compound interest?"),
        ("how do i conect my google calender", "How do I connect my Google Calendar?"),
        ("did they recieve it", "Did they receive it?"),
        ("Summarise the programme of the theatre", "Summarize the program of the theater"),
        ("Who analysed my favourite colour?", "Who analyzed my favorite color?"),
        ("Was the licence cancelled?", "Was the license canceled?"),
        ("What is teh captial of Ausrtalia?", "What is the capital of Australia?"),
        ("what helps with hayfever", "What helps with hay fever?"),
        ("Does home-made jam last?", "Does homemade jam last?"),
    ],
)
def test_spelling_is_no_other_word(asked: str, kept: str) -> None:
    knows = minilm().knows
    for one, other in ((asked, kept), (kept, asked)):
        found = respelled(one, other, knows)
        assert found[0].lower().rstrip("?") == found[1].lower().rstrip("?")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I fill in the form?", "How do I fill in the from?"),
        ("Is sulfate safe?", "Is sulfite safe?"),
        ("What is ethane?", "What is ethene?"),
        ("How long is filing?", "How long is filling?"),
        ("Is it for four?", "Is it four for four?"),
        ("Can I get desert here?", "Can I get dessert here?"),
        ("Is it an hour?", "Is it an our?"),
        ("Is my crp high?", "Is my cpr high?"),
        ("Is it a part of it?", "Is it apart of it?"),
        ("Which books are by Mr Thomsen?", "Which books are by Mr Thomson?"),
    ],
)
def test_two_words_stay_two(one: str, other: str) -> None:
    assert respelled(one, other, minilm().knows) == (one, other)


@given(st.text("abeinorst ", max_size=40), st.text("abeinorst ", max_size=40))
def test_only_what_the_other_question_shows_is_put_right(one: str, other: str) -> None:
    assert respelled(one, one, minilm().knows) == (one, one)
    first, second = respelled(one, other, minilm().knows)
    assert set(first.split()) <= {*one.split(), *other.split()}
    assert set(second.split()) <= {*one.split(), *other.split()}
    assert len(first.split()) <= len(one.split())


def test_without_a_vocabulary_only_british_words_are_others() -> None:
    assert respelled("my colour calender", "My color calendar", every_word)[0] == "my color calender"
    assert respelled("was it tiled", "was it tilled", every_word) == ("was it tiled", "was it tilled")


def test_a_slip_is_served_and_a_negation_beside_it_is_not() -> None:
    learned = verifier_for(minilm())
    assert isinstance(learned, Learned)
    kept = "How do I connect my Google Calendar?"
    assert learned.objection("how do i conect my google calender", kept, 0.7) is None
    assert learned.objection("how do i disconect my google calender", kept, 0.9) is not None
