"""Two questions with the same words spelt the same: a slip of the keyboard is no other word, nor is British spelling.

Only what the other question shows is put right, one edit a word, and only where one of the two is a word at all: "form"
and "from" are two words, "calender" beside "calendar" is a slip. In a name, only letters that have changed places are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from pipeline.cache.semantic.verification.lexicon import lexicon

Knows = Callable[[str], bool]
_WORD = re.compile(r"[a-z]+")
_LEAST = 5  # letters of a word that may be a slip
_LEAST_EXCHANGED = 4  # where two have changed places
_LEAST_PART = 3  # of a word that may be written as two
_VOWELS = frozenset("aeiouy")
_BRITISH = (  # whatever else they turn a word into is none, so that no two words become one: "tiled" and "tilled" stay
    (re.compile(r"(?<=[a-z]{3})is(?=(e|ed|es|er|ers|ing|ation|ations)$)"), "iz"),  # summarise
    (re.compile(r"(?<=al)ys(?=(e|ed|es|er|ers|ing)$)"), "yz"),  # analyse
    (re.compile(r"(?<=[a-z]{2})our(?=(s|ed|ing|ite|ites|ful|able|al|)$)"), "or"),  # colour, favourite
    (re.compile(r"(?<=[a-z][bt])re(?=s?$)"), "er"),  # centre
    (re.compile(r"(?<=[a-z]{3}[aeiou]l)l(?=(ed|ing|er|ers)$)"), ""),  # travelled
    (re.compile(r"(?<=gram)me(?=s?$)"), ""),  # programme
    (re.compile(r"(?<=[dfn])ence(?=s?$)|(?<=lic)ence(?=s?$)"), "ense"),  # defence, licence
    (re.compile(r"(?<=al)ogue(?=s?$)"), "og"),  # catalogue
)


def every_word(_: str) -> bool:
    """Knows no slips."""
    return True


def respelled(asked: str, kept: str, knows: Knows) -> tuple[str, str]:
    """Both, with what is spelt otherwise as the other has it.

    Args:
        knows: whether a lower-case word is one.

    >>> respelled("Summarise my calender", "Summarize my calendar today", {"calendar"}.__contains__)
    ('Summarize my calendar', 'Summarize my calendar today')
    """
    left, right = _apart(asked, kept)
    if not left or not right:
        return asked, kept
    asked, kept = _joined(asked, right), _joined(kept, left)
    left, right = _apart(asked, kept)
    for word, known in [(word, knows(word)) for word in left]:
        for beside in right:
            if word[0] != beside[0] and word[:2] != beside[1::-1]:
                continue
            if _canonical(word) == _canonical(beside):
                asked = _replaced(asked, word, beside)
            elif known == knows(beside):
                continue
            elif not known and _slip(word, beside, asked):
                asked = _replaced(asked, word, beside)
            elif known and _slip(beside, word, kept):
                kept = _replaced(kept, beside, word)
    return asked, kept


def _apart(asked: str, kept: str) -> tuple[frozenset[str], frozenset[str]]:
    """The words that only one of them has."""
    one, other = _words(asked), _words(kept)
    return one - other, other - one


@lru_cache(4096)
def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower()))


@lru_cache(8192)
def _canonical(word: str) -> str:
    """As Americans spell it, if it is such a word; else something that only equal words have in common."""
    for british, american in _BRITISH:
        word = british.sub(american, word)
    return word


def _joined(text: str, words: frozenset[str]) -> str:
    """With what is one of the words but for a space or a hyphen put as that: "hay fever", "home-made"."""
    for first, second in pairwise(_WORD.findall(text.lower())):
        word = first + second
        if word in words and min(len(first), len(second)) >= _LEAST_PART:
            text = re.sub(rf"(?i)\b{first}[ -]{second}\b", word, text)
    return text


def _slip(one: str, other: str, text: str) -> bool:
    """Whether two letters have changed places, or one is missing or another: never the first, and not in names.

    Not in "sulfate" and "sulfite", "ethane" and "ethene": there such a letter is the meaning. Of short words, only
    those that mean little by themselves: "teh" is a slip, "crp" beside "cpr" is not.
    """
    if _exchanged(one, other):
        return len(one) >= _LEAST_EXCHANGED or other in lexicon().fillers or other in lexicon().light
    if _is_name(one, text):
        return False
    if min(len(one), len(other)) < _LEAST or abs(len(one) - len(other)) > 1 or one[0] != other[0]:
        return False
    start = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    rest, beside = one[start:], other[start:]
    if len(rest) == len(beside):
        names_it = len(rest) == 3 and {rest[0], beside[0]} <= _VOWELS
        return rest[1:] == beside[1:] and not names_it
    return rest[1:] == beside or rest == beside[1:]


def _exchanged(one: str, other: str) -> bool:
    """Whether two letters side by side have changed places."""
    if one == other or len(one) != len(other):
        return False
    at = next(at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return one[at : at + 2] == other[at : at + 2][::-1] and one[at + 2 :] == other[at + 2 :]


def _is_name(word: str, text: str) -> bool:
    """Whether it is capitalised within the text: "Andersen" is nobody's slip for "Anderson"."""
    return word.capitalize() in text[1:]


def _replaced(text: str, word: str, by: str) -> str:
    def as_written(found: re.Match[str]) -> str:
        return by.capitalize() if found[0][0].isupper() else by

    return re.sub(rf"(?<![a-z]){word}(?![a-z])", as_written, text, flags=re.IGNORECASE)
