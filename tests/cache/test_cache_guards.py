"""Guards: what forbids that one answer serves two questions, and what is only another wording."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pipeline.cache.semantic.guards import GUARDS, findings, read

QUESTIONS = (
    "Can I pay in 3 parts?", "Is it safe to eat this?", "Does Anna owe Maria money?", "What is error E1234?",
    "Wie lange dauert die Lieferung nach Bern?", "¿Cuánto cuesta el envío a Lima?", "How do I reset my password?",
    "Quelle est la capitale du Pérou ?", "Where is my parcel?", 'What does "save as" do?',
)  # fmt: skip
questions = st.sampled_from(QUESTIONS)


@pytest.mark.parametrize(
    ("guard", "one", "other"),
    [
        ("numbers", "Can I pay in 3 parts?", "Can I pay in four parts?"),
        ("numbers", "Does it weigh 5 kg?", "Does it weigh 5 lb?"),
        ("numbers", "Is it open at 9 am?", "Is it open at 9 pm?"),
        ("numbers", "Will it arrive on Monday?", "Will it arrive on Tuesday?"),
        ("numbers", "What happened on 5 May 1998?", "What happened on 5 May 1999?"),
        ("numbers", "Does it cost $5?", "Does it cost €5?"),
        ("numbers", "What comes in the first year?", "What comes in the second year?"),
        ("numbers", "What is error E1234?", "What is error E1243?"),
        ("numbers", "Is https://a.example/x up?", "Is https://a.example/y up?"),
        ("numbers", "What does git commit -a do?", "What does git commit -m do?"),
        ("numbers", "How do I open a .docx file?", "How do I open a .xlsx file?"),
        ("numbers", "Should I buy the iPhone 7?", "Should I buy the iPhone 6s?"),
        ("names", "Did Anna Smith sign the new contract?", "Did Maria Smith sign the new contract?"),
        ("names", "is it better to live in Lima or in Bogota", "is it better to live in Lima or in Quito"),
        ("names", "Quelle est la capitale du Pérou ?", "Quelle est la capitale du Chili ?"),
        ("negation", "Is it safe to eat this?", "Is it not safe to eat this?"),
        ("negation", "Why can I log in?", "Why can't I log in?"),
        ("negation", "Kann ich das essen?", "Kann ich das nicht essen?"),
        ("names", "Was ist die Hauptstadt von Peru?", "Was ist die Hauptstadt von Chile?"),
        ("negation", "Pourquoi la lune tourne ?", "Pourquoi la lune ne tourne pas ?"),
        ("negation", "¿Puedo comer esto?", "¿No puedo comer esto?"),
        ("accents", "Ist das schon?", "Ist das schön?"),
        ("accents", "¿Cuántos años tienes?", "¿Cuántos anos tienes?"),
        ("accents", "Est-ce que tu es là ?", "Est-ce que tu es la ?"),
    ],
)  # fmt: skip
def test_a_guard_says_what_differs(guard: str, one: str, other: str) -> None:
    for asked, kept in ((one, other), (other, one)):
        found = findings(asked, kept)
        assert found[guard].partition(":")[0] == guard
        for question in (one, other):
            assert not findings(question, f"{question} Please!")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Does it cost $1,000?", "Does it cost one thousand dollars?"),
        ("Can it be done in 60 minutes?", "Can it be done in one hour?"),
        ("Which one is better?", "Which is better?"),
        ("What can I do in May?", "What may I do?"),
        ("Is she a nurse or a doctor?", "Is she a doctor or a nurse?"),
        ("Is Tom called by Anna?", "Does Anna call Tom?"),
        ("What's the distance between Jupiter and Mars?", "What's the distance between Mars and Jupiter?"),
        ("Isn't it too late?", "Is it too late?"),
        ("Can I do it or not?", "Can I do it?"),
        ("How do I write to Mr. Smith?", "how do i write to mr smith"),
        ("What Is The Best Way To Cook Rice?", "How is rice cooked best?"),
        ("HOW DO I COOK RICE?", "How do I boil rice?"),
        ("Was ist der Unterschied zwischen Zins und Rente?", "Wie unterscheiden sich Zins und Rente?"),
        ("Où est le café où je suis allé ?", "Où est le café ?"),
        ("¿Qué puertas están abiertas?", "¿Cuáles de las puertas están abiertas?"),
        ("Who works for the U.S. government?", "who works for the US government"),
    ],
)  # fmt: skip
def test_another_wording_is_not_forbidden(one: str, other: str) -> None:
    for asked, kept in ((one, other), (other, one)):
        assert not findings(asked, kept)


def test_names_are_read_by_their_capitals_as_german_nouns_are() -> None:
    assert read("Did Anna meet Tom in the garden?").names == {"anna", "tom"}
    assert read("Hat die Anna den Tom im Garten getroffen?").names == {"anna", "tom", "garten"}
    assert read("Anna a-t-elle vu Tom dans le jardin ?").names == {"tom"}


@given(questions, st.sampled_from(["Please, {}", "{} Thanks!", "Hello! {}", "  {}  "]))
def test_being_polite_changes_nothing(question: str, how: str) -> None:
    assert not findings(question, how.format(question))


@given(questions, st.integers(2, 10**6), st.integers(2, 10**6))
def test_another_number_is_another_question(question: str, one: int, other: int) -> None:
    assume(one != other)
    assert "numbers" in findings(f"{question} Number {one}", f"{question} Number {other}")


# What readers of questions have stumbled over, or might: options, endings without a word, digits that int() refuses.
ODD = (
    "-rf", "--force", "-a-b", "-", "n't", "N't", "'s", "’s", "5²", "12:5²", "² million", "١:٣٠", "pm", "a.m", "$", "°",
    "half an", "twenty", "or more", "by", "who", "-who", "https://", "@", "a@b", "_", "\x00", "\ud800", "5 - 3",
    "1e999", "ŉ", "İ", '"', "`", "''", ", right?", "1,,2", "1..2", "one", "9" * 400, "9" * 5000 + ":30 am",
    "🎉", "+", "and/or",
)  # fmt: skip
words = st.one_of(st.sampled_from(ODD), questions, st.text(max_size=5))
odd_texts = st.one_of(st.text(max_size=300), st.builds(str.join, st.sampled_from(["", " "]), st.lists(words)))


@given(odd_texts, odd_texts)
@example("How do I undo rm -rf in linux?", "How do I undo it?")
@example("Why n't I?", "Is it 5² pm?")
@settings(deadline=None)
def test_no_text_is_too_odd(one: str, other: str) -> None:
    assert findings(one, other) == findings(other, one)
    assert set(findings(one, other)) <= set(GUARDS)
    assert not findings(one, one)
