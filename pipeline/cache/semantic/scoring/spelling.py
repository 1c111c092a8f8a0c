"""Two questions with the same words spelt the same: a slip of the keyboard is no other word, nor is British spelling.

Only what the other question shows is put right, one edit a word, and only where one of the two is a word at all: "form"
and "from" are two words, "calender" beside "calendar" is a slip. A name is never one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

Knows = Callable[[str], bool]
_WORD = re.compile(r"[a-z]+")
_LEAST = 5  # letters of a word that may be a slip
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
    one, other = _words(asked), _words(kept)
    left, right = one - other, other - one
    if not left or not right:
        return asked, kept
    for word in left:
        for beside in right:
            if _canonical(word) == _canonical(beside):
                asked = _replaced(asked, word, beside)
            elif _slip(word, beside) and knows(word) != knows(beside):
                if knows(beside) and not _is_name(word, asked):
                    asked = _replaced(asked, word, beside)
                elif knows(word) and not _is_name(beside, kept):
                    kept = _replaced(kept, beside, word)
    return asked, kept


@lru_cache(4096)
def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower()))


@lru_cache(8192)
def _canonical(word: str) -> str:
    """As Americans spell it, if it is such a word; else something that only equal words have in common."""
    for british, american in _BRITISH:
        word = british.sub(american, word)
    return word


def _slip(one: str, other: str) -> bool:
    """Whether a letter is missing, is another one, or has changed places with its neighbour; never the first.

    Not in "sulfate" and "sulfite", "ethane" and "ethene": there such a letter is the meaning.
    """
    if min(len(one), len(other)) < _LEAST or abs(len(one) - len(other)) > 1 or one[0] != other[0]:
        return False
    start = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    rest, beside = one[start:], other[start:]
    if len(rest) == len(beside):
        if rest[2:] == beside[2:] and rest[:2] == beside[1::-1]:
            return True
        names_it = len(rest) == 3 and {rest[0], beside[0]} <= _VOWELS
        return rest[1:] == beside[1:] and not names_it
    return rest[1:] == beside or rest == beside[1:]


def _is_name(word: str, text: str) -> bool:
    """Whether it is capitalised within the text: "Andersen" is nobody's slip for "Anderson"."""
    return word.capitalize() in text[1:]


def _replaced(text: str, word: str, by: str) -> str:
    def as_written(found: re.Match[str]) -> str:
        return by.capitalize() if found[0][0].isupper() else by

    return re.sub(rf"(?<![a-z]){word}(?![a-z])", as_written, text, flags=re.IGNORECASE)
