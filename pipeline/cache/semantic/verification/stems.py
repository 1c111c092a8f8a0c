"""One form for the forms of an English word: plural, tense and participle go. Not linguistics; equal in, equal out."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

_VOWELS = frozenset("aeiouy")


def is_participle(word: str) -> bool:
    """Whether it may be what is done to somebody: "is X hurt by Y"."""
    return word.endswith(("ed", "en", "ught", "wn")) or word in _forms().participles


class _Forms(NamedTuple):
    irregular: dict[str, str]  # form -> stem
    kept: frozenset[str]  # words without an ending
    participles: frozenset[str]


@cache
def _forms() -> _Forms:
    text = (files(__package__) / "data" / "forms.yaml").read_text(encoding="utf-8")
    raw: dict[str, Any] = yaml.load(text, Loader=yaml.BaseLoader)  # "yes" is a word here
    irregular = {form: stem for stem, forms in raw["irregular"].items() for form in forms}
    return _Forms(irregular, frozenset(raw["kept"]), frozenset(raw["participles"]))


@lru_cache(8192)
def stem(word: str) -> str:
    """
    >>> [stem(word) for word in ("cards", "cancelled", "cancelling", "cancels", "cancel", "deliveries", "delivery")]
    ['card', 'cancel', 'cancel', 'cancel', 'cancel', 'delivery', 'delivery']
    """
    irregular, kept, _ = _forms()
    if word in irregular:
        return _bare(irregular[word])
    word = word.removesuffix("'s").removesuffix("'")
    if len(word) <= 3 or word in kept or not word.isalpha():
        return word
    for ending in ("ies", "ied"):
        if word.endswith(ending) and len(word) > 4:
            return word[:-3] + "y"
    if word.endswith(("sses", "shes", "ches", "xes", "zzes")):
        return _bare(word[:-2])
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return stem(word[:-1])
    for ending in ("ing", "ed"):
        cut = word if word.endswith("eed") else word.removesuffix(ending)
        if cut != word and len(cut) > 2 and _VOWELS & set(cut):
            return _undoubled(cut)
    if len(word) > 7 and word.endswith("ly"):
        return _bare(word[:-2])  # internationally
    if len(word) > 4 and word.endswith("ie"):
        return word[:-2] + "y"  # cookie, as cookies
    return _bare(word)


def _undoubled(cut: str) -> str:
    """stopp to stop, but call and pass stay."""
    doubled = len(cut) > 3 and cut[-1] == cut[-2] and cut[-1] not in "flsz" and cut[-1] not in _VOWELS
    if doubled:
        return cut[:-1]
    if len(cut) == 3 and cut[0] not in _VOWELS and cut[1] in _VOWELS and cut[2] not in _VOWELS | set("wxy"):
        return cut + "e"  # hated, liked, voted
    return _bare(cut)


def _bare(word: str) -> str:
    """Without the e that ing and ed swallow, and without a doubled l: charging meets charge, cancelled cancel."""
    return (
        word[:-1]
        if (len(word) > 4 and word.endswith("e")) or (len(word) > 5 and word.endswith("ll"))
        else word
    )
