"""What the checks know of English, read once from data/lexicon.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from pipeline.cache.semantic.verification.stems import stem

Phrase = tuple[tuple[str, ...], tuple[str, ...]]  # what is written, what it is read as
_OPPOSING_PREFIXES = ("un", "in", "im", "il", "ir", "dis", "non", "non-", "mis")


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Words are in lower case; those that are compared with words of a text are stems."""

    phrases: Mapping[
        tuple[str, ...], tuple[Phrase, ...]
    ]  # by their first two words, or one; the longest first
    fillers: frozenset[str]
    light: frozenset[str]  # stems of verbs that say little
    owners: Mapping[str, str]
    telling: Mapping[str, str]  # word: what it is about
    opposites: Mapping[str, frozenset[str]]
    groups: Mapping[str, frozenset[int]]  # stem: the groups of synonyms that it is in
    symmetric: frozenset[str]
    joining: frozenset[str]
    roles: frozenset[str]
    attaching: frozenset[str]
    frames: frozenset[str]
    alike: tuple[frozenset[str], ...]
    negations: frozenset[str]
    months: Mapping[str, int]
    weekdays: Mapping[str, int]
    pronouns: Mapping[str, str]
    tenses: Mapping[str, str]
    units: Mapping[str, str]

    def synonymous(self, one: str, other: str) -> bool:
        """Of two stems."""
        if one == other:
            return True
        groups = self.groups.get(one)
        return groups is not None and not groups.isdisjoint(self.groups.get(other, ()))

    def opposite(self, one: str, other: str) -> bool:
        """Of two stems: listed, or one with a prefix that denies it."""
        if other in self.opposites.get(one, ()):
            return True
        base = one.removesuffix("less").removesuffix("ful")
        if base != one and other in (f"{base}less", f"{base}ful"):
            return True
        shorter, longer = sorted((one, other), key=len)
        return len(shorter) > 3 and longer.endswith(shorter) and longer[: -len(shorter)] in _OPPOSING_PREFIXES


@cache
def lexicon() -> Lexicon:
    """The one of this package."""
    text = (files(__package__) / "data" / "lexicon.yaml").read_text(encoding="utf-8")
    # BaseLoader: every value stays text ("on" and "no" are words here)
    raw: dict[str, Any] = yaml.load(text, Loader=yaml.BaseLoader)
    return Lexicon(
        phrases=_phrases(raw["phrases"]),
        fillers=frozenset(raw["fillers"]) | frozenset(map(stem, raw["fillers"])),
        light=frozenset(map(stem, raw["light"])),
        owners=raw["owners"],
        telling={word: about for about, words in raw["telling"].items() for word in words},
        opposites=_opposites(raw["opposites"]),
        groups=_groups(raw["synonyms"]),
        symmetric=frozenset(map(stem, raw["symmetric"])),
        joining=frozenset(raw["joining"]),
        roles=frozenset(raw["roles"]),
        attaching=frozenset(raw["attaching"]),
        frames=frozenset(raw["frames"]),
        alike=tuple(map(frozenset, raw["alike"])),
        negations=frozenset(raw["negations"]),
        months=_numbered(raw["months"]),
        weekdays=_numbered(raw["weekdays"]),
        pronouns=raw["pronouns"],
        tenses={word: tense for tense, words in raw["tenses"].items() for word in words},
        units={form: unit for unit, forms in raw["units"].items() for form in forms},
    )


def _phrases(raw: Mapping[str, list[str]]) -> dict[tuple[str, ...], tuple[Phrase, ...]]:
    found: dict[tuple[str, ...], list[Phrase]] = {}
    for read_as, written in raw.items():
        for phrase in written:
            words = tuple(phrase.split())
            found.setdefault(words[:2], []).append((words, tuple(read_as.split())))
    return {
        first: tuple(sorted(phrases, key=lambda phrase: -len(phrase[0]))) for first, phrases in found.items()
    }


def _opposites(raw: list[str]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for pair in raw:
        one, other = map(stem, pair.split())
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return {word: frozenset(others) for word, others in found.items()}


def _groups(raw: list[str]) -> dict[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for number, group in enumerate(raw):
        for word in group.split():
            found.setdefault(stem(word), set()).add(number)
    return {word: frozenset(numbers) for word, numbers in found.items()}


def _numbered(names: list[str]) -> dict[str, int]:
    """Whole names and their first three letters."""
    return {form: number for number, name in enumerate(names, 1) for form in (name, name[:3])}
